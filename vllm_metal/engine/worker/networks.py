# SPDX-License-Identifier: Apache-2.0
"""The target and draft networks that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx

from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.batch.per_request_state import PerRequestState
from vllm_metal.engine.batch.prompt_column import PromptColumn
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.memory.planner import AdapterBytes
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.models.stage import Stage, check_stages
from vllm_metal.engine.spec_decode.network import DraftNetwork
from vllm_metal.engine.spec_decode.registry import load_network
from vllm_metal.settings.runner import pools
from vllm_metal.settings.whole_prompts import attends_to_whole_prompts

if TYPE_CHECKING:
    import mlx.nn as nn
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.pooler.abstract import Pooler

    from vllm_metal.engine.lora.adapters import Adapters
    from vllm_metal.engine.vision.column import ImageColumn
    from vllm_metal.engine.vision.encoder import Encoder
    from vllm_metal.engine.weights.disk_tables import TableRule


@dataclass(frozen=True)
class Networks:
    """The loaded target, and the draft network if there is one."""

    target: ModelParts
    layers: list[StatefulLayer]  # its own
    draft: DraftNetwork | None
    draft_bytes: int  # bytes of the draft network's weights
    #: Per-request inputs of the target's modules, see `attention.forward_inputs.of_rows`. They
    #: outlive a runner: a row is of whoever entered it last.
    columns: Sequence[PerRequestState] = ()
    adapters: Adapters | None = None  # None: without --enable-lora
    encoder: Encoder | None = None  # encoder of images
    pooler: Pooler | None = None  # pools the target's hidden states; None: it samples
    elsewhere: Sequence[StatefulLayer] = ()  # the target's that other ranks have

    @staticmethod
    def load_stage(
        config: VllmConfig,
        stage_of: Callable[[int], Stage],
        share: Callable[[nn.Module], None] = lambda model: None,
    ) -> Networks:
        """Loads a pipeline rank's part of the target, without reading other weights.

        Args:
            config: vLLM's.
            stage_of: maps the target's number of layers to the rank's stage.
            share: reduces each layer to the rank's share of its heads.

        Raises:
            ModelLoadError: see `loader.load`.
            NotImplementedError: the layers cannot be separated; see also `attention_layers`.
        """
        family = loader.model_type(config)
        found: list[tuple[Stage, list[StatefulLayer]]] = []

        def prepare(model: nn.Module) -> None:
            share(model)
            # Before layers are taken away: a page's size is made of all of them, on every rank.
            layers = attention_layers(model, family)
            stage = stage_of(len(model.layers))
            if not stage.is_whole:
                check_stages(model, layers)
                stage.keep(model)
            found.append((stage, layers))

        model = loader.load(config, prepare=prepare)
        ((stage, layers),) = found
        if stage.is_whole:
            return Networks(ModelParts(model), layers, None, 0)
        parts = ModelParts(model, partial(stage.caches, layers=layers))
        own = stage.own(layers)
        elsewhere = [layer for layer in layers if layer not in own]
        return Networks(parts, own, None, 0, elsewhere=elsewhere)

    @staticmethod
    def load(config: VllmConfig, tables: TableRule | None = None) -> Networks:
        """Loads the networks of a single process; `tables` as in `loader.load`."""
        if pools(config):
            from vllm_metal.engine.pooling import decoders  # imports vLLM's poolers

            pooling = decoders.load(config, tables)
            layers = attention_layers(pooling.parts.model, loader.model_type(config))
            return Networks(pooling.parts, layers, None, 0, pooler=pooling.pooler)
        model = loader.load(config, tables=tables)
        layers = attention_layers(model, loader.model_type(config))
        adapters, columns = _adapters(model, config)
        target = ModelParts(model)
        images = _images(config, target)
        before = mx.get_active_memory()
        draft = load_network(config, target, images)
        draft_bytes = mx.get_active_memory() - before
        columns = columns if images is None else (*columns, images)
        if attends_to_whole_prompts(config.model_config):
            columns = (*columns, PromptColumn(config.scheduler_config.max_num_seqs))
        encoder = None if images is None else images.encoder
        return Networks(target, layers, draft, draft_bytes, columns, adapters, encoder)

    def variables(self, inputs: ForwardInputs) -> object:
        """LoRA matrices that the target's forward of `inputs` reads; None without adapters."""
        return None if self.adapters is None else self.adapters.updates.variables(inputs)

    @property
    def adapter_bytes(self) -> AdapterBytes | None:
        """Maximum bytes of LoRA adapters; None if none are served."""
        return None if self.adapters is None else self.adapters.nbytes

    def heaviest_extras(self, rows: Rows) -> Mapping[str, mx.array]:
        """The extra inputs (ForwardInputs.extras) with which a forward takes the most memory."""
        return {} if self.adapters is None else self.adapters.updates.heaviest(rows)

    @property
    def forward_layers(self) -> list[StatefulLayer]:
        """Layers that a forward of the target has caches for: its own, and those of a draft network
        whose K/V it writes.
        """
        return [*self.layers, *(self.draft.context_layers if self.draft else ())]

    @property
    def all_layers(self) -> list[StatefulLayer]:
        """Layers of both networks, whose state shares blocks."""
        return [*self.layers, *(self.draft.layers if self.draft else ())]

    @property
    def layers_of_all_ranks(self) -> list[StatefulLayer]:
        """Layers of all ranks, from which each rank derives the same KV cache groups and blocks."""
        return [*self.all_layers, *self.elsewhere]

    @property
    def layers_with_kernels(self) -> list[StatefulLayer]:
        """Layers of all ranks, and the target's as a draft network that only reads them attends."""
        return [*self.layers_of_all_ranks, *(self.draft.reading_layers if self.draft else ())]

    def image_bytes(self, config: VllmConfig) -> int:
        """Measured bytes that images take besides weights and pool; 0 if none are served."""
        if self.encoder is None:
            return 0
        from vllm_metal.engine.vision import room

        return room.image_bytes(self.encoder, config)


def _adapters(
    model: nn.Module, config: VllmConfig
) -> tuple[Adapters | None, Sequence[PerRequestState]]:
    """LoRA adapters and their per-request state; None and () if none are served."""
    if config.lora_config is None:
        return None, ()
    from vllm_metal.engine.lora.adapters import Adapters
    from vllm_metal.engine.lora.column import AdapterColumn

    adapters = Adapters(model, config.lora_config, loader.mlx_dtype(config))
    return adapters, (AdapterColumn(adapters),)


def _images(config: VllmConfig, target: ModelParts) -> ImageColumn | None:
    """The per-request state that feeds images to the target; None if only text is served."""
    multimodal = config.model_config.multimodal_config
    if multimodal is None or multimodal.language_model_only:
        return None
    from vllm_metal.engine.vision import loading  # nothing of it where text is served
    from vllm_metal.patches.vllm_patches import model_info

    model_info.register_image_models()  # the scheduler, made behind this, asks for their processor
    return loading.load(config, target)
