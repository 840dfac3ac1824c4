# SPDX-License-Identifier: Apache-2.0
"""The networks that an engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from vllm_metal.attention.layers import attention_layers
from vllm_metal.batch.columns import RequestColumn
from vllm_metal.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.models import loader
from vllm_metal.models.parts import ModelParts
from vllm_metal.spec_decode.network import DraftNetwork
from vllm_metal.spec_decode.registry import load_network

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.pooler.abstract import Pooler

    from vllm_metal.vision.column import ImageColumn
    from vllm_metal.vision.encoder import Encoder


@dataclass(frozen=True)
class Networks:
    """The loaded networks: the target, and a draft network where there is one."""

    target: ModelParts
    layers: list[StatefulLayer]  # its own
    draft: DraftNetwork | None
    draft_bytes: int  # of its weights
    #: What modules of the target read of requests, see `attention.forward_inputs.of_rows`. They
    #: outlive a runner: a row is of whoever entered it last.
    columns: Sequence[RequestColumn] = ()
    encoder: Encoder | None = None  # of images
    pooler: Pooler | None = None  # of the target's hidden states; None: it samples

    @staticmethod
    def load(config: VllmConfig) -> Networks:
        if config.model_config.runner_type == "pooling":
            from vllm_metal.pooling import decoders  # imports vLLM's poolers

            pooling = decoders.load(config)
            layers = attention_layers(pooling.parts.model, loader.model_type(config))
            return Networks(pooling.parts, layers, None, 0, pooler=pooling.pooler)
        model = loader.load(config)
        layers = attention_layers(model, loader.model_type(config))
        target = ModelParts(model)
        images = _images(config, target)
        before = mx.get_active_memory()
        draft = load_network(config, target)
        draft_bytes = mx.get_active_memory() - before
        if images is None:
            return Networks(target, layers, draft, draft_bytes)
        return Networks(target, layers, draft, draft_bytes, (images,), images.encoder)

    @property
    def all_layers(self) -> list[StatefulLayer]:
        """Layers of both networks; what they keep lies in the same blocks."""
        return [*self.layers, *(self.draft.layers if self.draft else ())]

    def image_bytes(self, config: VllmConfig) -> int:
        """Bytes that images take beside weights and pool, measured; 0 where none are served."""
        if self.encoder is None:
            return 0
        from vllm_metal.vision import room

        return room.image_bytes(self.encoder, config)


def _images(config: VllmConfig, target: ModelParts) -> ImageColumn | None:
    """What brings images to the target; None: its text alone is served."""
    multimodal = config.model_config.multimodal_config
    if multimodal is None or multimodal.language_model_only:
        return None
    from vllm_metal.vision import loading  # nothing of it where text is served
    from vllm_metal.vllm_patches import model_info

    model_info.answer_for_images()  # the scheduler, made behind this, asks for their processor

    return loading.load(config, target)
