# SPDX-License-Identifier: Apache-2.0
"""Predicts what an engine would measure for a model on a machine, and the resulting KV pool.

The computation and its inputs are the engine's own (vllm_metal.engine.memory.budget): the loader
builds the model without reading weights, its layers are inspected, and vLLM places them in blocks.
Only the forward pass is not run (vllm_metal.cli.fit.step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import mlx.core as mx
import torch

from vllm_metal.cli.fit.images import Images
from vllm_metal.cli.fit.machine import Machine
from vllm_metal.cli.fit.ranks import SimulatedGroup
from vllm_metal.cli.fit.step import step_peak
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.distributed.sharding import shard
from vllm_metal.engine.kv_cache import formats
from vllm_metal.engine.kv_cache.formats import MLX_DTYPES
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import choose_block_size, kv_cache_specs
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.lora.updates import adapter_bytes
from vllm_metal.engine.memory import budget
from vllm_metal.engine.memory.budget import Budget, Measured, Request, Settings
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.memory.planner import at_work, quantized_share
from vllm_metal.engine.memory.pool_limits import settings_of
from vllm_metal.engine.memory.profile import LargestCalls, Peaks
from vllm_metal.engine.models import headless
from vllm_metal.engine.models.loader import lazy_model, weight_bytes
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.models.stage import Stage, check_stages
from vllm_metal.engine.weights.disk_tables import TableRule, tables_of
from vllm_metal.engine.weights.lazy import outlines_only
from vllm_metal.patches.mlx_patches import registry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Model:
    """A model whose modules are built, but whose weights are not loaded."""

    model_type: str
    dtype: torch.dtype
    weights: int  # bytes as the engine will hold them, including the vision tower's
    tables: int  # bytes of embedding tables that stay on disk, not among `weights`
    parts: ModelParts
    layers: Sequence[StatefulLayer]  # this rank's layers
    other_ranks_layers: Sequence[StatefulLayer] = ()  # layers of other ranks
    stage: Stage | None = None  # None: the rank has all layers
    images: Images | None = None
    draft_weights: int = 0  # weights of a drafter, in addition
    draft_layers: Sequence[StatefulLayer] = ()
    context_layers: Sequence[StatefulLayer] = ()  # context writers of a drafter

    @staticmethod
    def read(
        folder: Path,
        model_type: str,
        dtype: torch.dtype,
        pools: bool = False,
        text_only: bool = False,
        ring: SimulatedGroup | None = None,
        stage_of: Callable[[int], Stage] | None = None,
        tables: TableRule | None = None,
    ) -> Model:
        """Builds a model, or a rank's part of it.

        Args:
            folder: has config.json and weight files, of which only headers are read.
            model_type: the model's type, for messages.
            dtype: dtype of the engine.
            pools: whether to leave out the head for logits.
            text_only: whether to leave out images.
            ring: replaces the group of tensor-parallel ranks, whose first one is estimated; None
                for one rank.
            stage_of: maps the number of layers to the rank's stage; None for all layers.
            tables: decides which embedding tables stay on disk; None: all weights are loaded.

        Raises:
            ShardingError: the model cannot be split across ranks.
            ValueError: there are fewer layers than ranks, or a rank would have none.
            ModelLoadError: the loader cannot build it.
            NotImplementedError: the engine does not serve it.
        """
        classes = headless.classes if pools else registry.classes
        with outlines_only():  # opening GGUF files would read them
            network = lazy_model(folder, MLX_DTYPES[dtype], classes=classes, tables=tables)
        if pools:
            headless.drop_head(network)
        if ring is not None:
            shard(network, cast("mx.distributed.Group", ring), model_type)
        # Before other stages' layers are removed, as on a rank.
        layers = own = attention_layers(network, model_type)
        stage, parts = None, None
        if stage_of is not None:
            stage = stage_of(len(network.layers))
            check_stages(network, layers)
            stage.keep(network)
            own = stage.own(layers)
            parts = ModelParts(network, partial(stage.caches, layers=layers))
        weights = weight_bytes(network)
        images = None if text_only else Images.read(folder, MLX_DTYPES[dtype])
        weights += 0 if images is None else images.weights
        elsewhere = [layer for layer in layers if layer not in own]
        parts = parts or ModelParts(network)
        on_disk = sum(table.nbytes for table in tables_of(network))
        return Model(model_type, dtype, weights, on_disk, parts, own, elsewhere, stage, images)

    @property
    def layers_of_all_ranks(self) -> list[StatefulLayer]:
        """Layers of all ranks, which together determine blocks and their groups."""
        return [*self.layers, *self.draft_layers, *self.other_ranks_layers]

    @property
    def forward_layers(self) -> list[StatefulLayer]:
        """Layers for which a forward has caches."""
        return [*self.layers, *self.context_layers]

    @property
    def all_layers(self) -> list[StatefulLayer]:
        """Layers of this rank and of its drafter, if any."""
        return [*self.layers, *self.draft_layers]

    @property
    def samples(self) -> bool:
        """Whether the rank has the last layer, and so samples tokens."""
        return self.stage is None or self.stage.is_last


@dataclass(frozen=True)
class Estimate:
    """The estimate for a model on a machine; sizes in bytes."""

    token_bytes: int  # K and V per token, in all layers
    draft_token_bytes: int  # a drafter's part of these
    tables: int  # embedding tables that stay on disk
    state_bytes: int  # recurrent state per request, independent of its length; 0: none
    block_size: int  # tokens per block
    needs: Needs  # needs in the pool
    measured: Measured  # values that the engine would measure
    settings: Settings
    quantized: float | None  # size of a quantized cache relative to this; None: this is quantized

    @property
    def budget(self) -> Budget:
        """The memory budget that the engine would log."""
        return budget.budget_of(self.measured, self.settings)

    @property
    def pool(self) -> int:
        """Size of the KV pool; 0 or negative if nothing is left for it."""
        return budget.pool_bytes(self.measured, self.settings)

    @property
    def num_blocks(self) -> int:
        return max(self.pool // self.needs.block_bytes, 0)

    @property
    def requests(self) -> int:
        """Requests of max_model_len that the pool holds at once."""
        free = max(self.num_blocks - 1, 0)  # vLLM keeps one block for itself
        return free // self.needs.blocks(self.settings.max_model_len)

    @property
    def tokens(self) -> int:
        """Tokens of K/V in requests of max_model_len, counted as vLLM does."""
        length = self.settings.max_model_len
        return self.num_blocks * length // self.needs.blocks(length)

    def of_length(self, tokens: int) -> Estimate:
        """Returns the estimate with a max_model_len of `tokens`, as if the user had set it."""
        return replace(self, settings=replace(self.settings, max_model_len=tokens, fitted=False))

    def request(self, count: int = 1) -> Request:
        """Returns the memory that `count` requests of max_model_len need in the pool."""
        return Request(replace(self.needs, requests=count), self.quantized)


def estimate(
    model: Model, config: VllmConfig, machine: Machine, peaks: Peaks | None = None
) -> Estimate:
    """Estimates the memory of an engine with `config`.

    `peaks`: measured peaks of the largest forward passes, None to estimate them. Raises ValueError
    if they cannot be estimated (vllm_metal.cli.fit.step).
    """
    pool_dtype = formats.pool_dtype(config.cache_config.cache_dtype, MLX_DTYPES[model.dtype])
    choose_block_size(config.cache_config, model.layers_of_all_ranks, pool_dtype)
    block_size = config.cache_config.block_size
    specs = kv_cache_specs(model.layers_of_all_ranks, block_size, pool_dtype)
    needs = Needs.of(config, specs, [layer.name for layer in model.other_ranks_layers])
    settings = settings_of(config, machine.kind, needs, machine.total)
    quantized = quantized_share(model.all_layers, pool_dtype)
    backend = _backend(model, machine, block_size)
    recorded = model.parts, model.forward_layers, config, backend, machine.kind
    found, vocab_size = step_peak(*recorded)
    rows_of_a_step = config.scheduler_config.max_num_batched_tokens
    at_rest = Measured(
        source=machine.source,
        total=machine.total,
        in_use=machine.in_use,
        weights=model.weights,
        draft_weights=model.draft_weights,
        adapters=_adapter_bytes(model, config),
        cache=machine.cache,
        images=0 if model.images is None else model.images.extra_bytes(rows_of_a_step),
    )
    measured = at_work(
        at_rest,
        settings,
        Request(needs, quantized),
        LargestCalls.of(config, model.all_layers, backend, vocab_size if model.samples else 0),
        found if peaks is None else peaks,
    )
    states = sum(layer.state_bytes for layer in model.layers)
    rows, of_drafter = (
        sum(
            layer.spec(block_size, pool_dtype).page_size_bytes
            for layer in layers
            if not layer.state_bytes
        )
        // block_size
        for layers in (model.all_layers, model.draft_layers)
    )
    return Estimate(
        rows,
        of_drafter,
        model.tables,
        states,
        block_size,
        needs,
        measured,
        settings,
        quantized,
    )


def _adapter_bytes(model: Model, config: VllmConfig) -> int:
    if config.lora_config is None:
        return 0
    found = adapter_bytes(model.parts.model, config.lora_config, MLX_DTYPES[model.dtype])
    return found.slots + found.cached  # slots on the device, and adapters cached besides


def _backend(model: Model, machine: Machine, block_size: int) -> KVBackend:
    dtype = MLX_DTYPES[model.dtype]
    # The engine's choice (kv_cache.choice), assuming that the kernels pass their self-check.
    refused = any(layer.unsupported(dtype, block_size) for layer in model.layers_of_all_ranks)
    return SCATTER if refused or machine.kind == "cpu" else KERNELS
