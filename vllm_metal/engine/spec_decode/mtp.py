# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (MTP): extra layers of a model that predict one token further.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. mlx-lm leaves these layers out of its models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.attention.attention_layer import AttentionLayer
from vllm_metal.engine.attention.conv_input_layer import ConvInputLayer
from vllm_metal.engine.attention.layers import decoder_layers
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.convolved_layer import ConvolvedLayer
from vllm_metal.engine.models.mtp_families import MTP_FAMILIES, MTPFamily, mtp_keys
from vllm_metal.engine.models.mtp_weights import mtp_weights
from vllm_metal.engine.models.parts import HiddenStates, ModelParts
from vllm_metal.engine.spec_decode.head import Head
from vllm_metal.engine.spec_decode.mtp_chain import ChainPasses, ChainProposer, MTPChain
from vllm_metal.engine.spec_decode.network import LAYER_PREFIX, DraftPool
from vllm_metal.engine.spec_decode.packed_network import packings
from vllm_metal.engine.spec_decode.paged_head import HeadNetwork, HeadPasses, HeadProposer
from vllm_metal.engine.weights.placing import install
from vllm_metal.patches.mlx_patches.seam import AttendingCache
from vllm_metal.settings.architectures import mtp_depth

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_metal.engine.batch.requests import Requests
    from vllm_metal.engine.spec_decode.draft_writer import DraftWriter
    from vllm_metal.engine.spec_decode.passes import Passes
    from vllm_metal.engine.vision.column import Axes, ImageColumn
    from vllm_metal.engine.vision.rotation import Rotation


class MTPHead(Head):
    """An MTP layer: `fc` joins the normed embedding and hidden state; a decoder layer follows."""

    def __init__(self, family: MTPFamily, args: Any, block: nn.Module) -> None:
        super().__init__()
        size, eps = args.hidden_size, getattr(args, family.eps)
        self._family = family
        self.input_size = size
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.norm: nn.Module = nn.RMSNorm(size, eps)

    def rotate_by_three(self, axes: Axes) -> Rotation:
        """Rotates as the target does; see Head."""
        from vllm_metal.engine.vision import rotation  # nothing of it where text is served

        return rotation.put_in(self.block, axes.sections)

    def __call__(
        self, embeds: mx.array, hidden: mx.array, caches: Sequence[AttendingCache]
    ) -> tuple[mx.array, mx.array]:
        if self._family.masks_first:  # they are trained without a token there
            embeds = mx.where(caches[0].offset[:, None] == 0, mx.zeros_like(embeds), embeds)
        parts = [self.embedding_norm(embeds), self.hidden_norm(hidden)]
        if self._family.hidden_first:
            parts.reverse()
        out = self.block(self.fc(mx.concatenate(parts, axis=-1))[:, None], None, *caches)[:, 0]
        normed = self.norm(out)
        return normed, normed if self._family.feeds_normed else out


def build_layer(
    family: MTPFamily, args: Any, config: Mapping[str, Any], dtype: mx.Dtype, index: int = 0
) -> tuple[MTPHead, list[StatefulLayer]]:
    """Builds a family's MTP layer, without weights, and describes its states in the KV cache.

    Args:
        family: the target's.
        args: the target's, as mlx-lm reads them.
        config: config.json of the checkpoint.
        dtype: dtype of activations.
        index: index of the MTP layer.

    Raises:
        NotImplementedError: the paged path does not support the layer's state, or config.json has
            an unsupported key or value; the message continues the layer's name.
    """
    block, windows = family.build_block(args, config, index)
    head = MTPHead(family, args, block)
    if family.norm_key is not None and not mtp_keys(config).get(family.norm_key):
        head.norm = nn.Identity()
    if isinstance(block, ConvolvedLayer):
        named = {f"{LAYER_PREFIX}layers.{index}.0": windows[0]}
        (layer,) = decoder_layers(block, named, args.hidden_size, dtype)
        assert isinstance(layer, AttentionLayer)
        return head, [layer, *ConvInputLayer.beside(layer, block.num_input_layers, block.taps)]
    first = index * len(windows)
    named = {f"{LAYER_PREFIX}layers.{first + i}": window for i, window in enumerate(windows)}
    return head, decoder_layers(block, named, args.hidden_size, dtype)


class MTP(HeadNetwork):
    """The target's own MTP layers: one makes all drafts, or each of several makes one."""

    def __init__(self, config: VllmConfig, target: ModelParts) -> None:
        """Loads the layers and makes the target record its hidden states from now on.

        Args:
            config: vLLM's; its speculative_config names the checkpoint, by default the target's.
            target: the model that the layers were trained with.

        Raises:
            loader.ModelLoadError: the checkpoint has no such MTP layers, or those of another
                target.
            NotImplementedError: the target does not expose its hidden states, or the paged path
                does not support a layer's state.
        """
        assert config.speculative_config is not None
        model_config = config.speculative_config.draft_model_config
        (architecture, *_) = model_config.architectures
        family = MTP_FAMILIES[architecture]  # the platform has refused all others
        count = num_layers(family, model_config, config.speculative_config.num_speculative_tokens)
        found = [_load(config, family, target, index) for index in range(count)]
        heads = [head for head, _ in found]
        if not family.numbers_on:
            for other in heads[1:]:
                other.update_modules({name: heads[0][name] for name in family.shared})
        head: Head = MTPChain(heads) if count > 1 else heads[0]
        head.embed_tokens = target.input_embedding
        if target.embedding_norm is not None:
            head.embed_tokens = nn.Sequential(target.input_embedding, target.embedding_norm)
        head.lm_head, head.num_tokens = target.output_head, target.num_logits
        if family.norms_states:
            head.target_norm = target.final_norm
        last = None if family.reads_normed else (len(target.model.layers),)
        layers = [layer for _, of_head in found for layer in of_head]
        super().__init__(config, head, layers, HiddenStates(target, last))

    def passes(self) -> HeadPasses:
        head, images = self._head, self._images
        return (ChainPasses if isinstance(head, MTPChain) else HeadPasses)(head, images)

    def drafting_by(self, passes: Passes) -> HeadProposer:
        if not isinstance(self._head, MTPChain):
            return super().drafting_by(passes)
        return ChainProposer(self._head, passes, self._states, self._num_drafts, self._images)

    def read_images(self, images: ImageColumn) -> None:
        if isinstance(self._head, MTPChain) and images.axes is not None:
            raise loader.ModelLoadError(
                "--speculative-config num_speculative_tokens "
                f"{self._num_drafts} is not supported with images and several MTP layers that "
                "rotate by several positions. Choose "
                "1, or serve text alone: --language-model-only."
            )
        super().read_images(images)

    def writer(self, pool: DraftPool, requests: Requests) -> DraftWriter:
        if isinstance(self._head, MTPChain):  # a step does not know the tokens that they read
            raise NotImplementedError("several MTP layers draft with the model alone")
        return super().writer(pool, requests)


def num_layers(family: MTPFamily, checkpoint: ModelConfig, num_drafts: int) -> int:
    """Number of MTP layers to load for `num_drafts` drafts of a request, at least 1."""
    is_split = getattr(checkpoint.hf_config, "is_split", False)
    depth = mtp_depth(checkpoint.hf_text_config.to_dict())
    return max(1, min(num_drafts, family.num_drafting(depth, is_split)))


def _load(
    config: VllmConfig, family: MTPFamily, target: ModelParts, index: int
) -> tuple[MTPHead, list[StatefulLayer]]:
    """Loads an MTP layer; arguments and errors as of MTP."""
    assert config.speculative_config is not None
    model_config = config.speculative_config.draft_model_config
    args, dtype = target.text_args, loader.mlx_dtype(config)
    given = model_config.hf_config.to_dict()
    try:
        head, layers = build_layer(family, args, given, dtype, index)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"the MTP layer of {model_config.model} {error}. Choose another method"
        ) from error
    placed = mtp_weights(config, family, target.model, args.num_hidden_layers, head, index)
    packed = packings(head, placed.arrays)
    try:
        install(head, replace(placed, packings=packed | placed.packings))
    except ValueError as error:
        key, stated = family.norm_key, mtp_keys(given)
        hint = "" if key is None else f" (config.json has {key}={stated.get(key)})"
        raise loader.ModelLoadError(
            f"the MTP layer of {model_config.model} does not fit the target: {error}{hint}. Choose "
            "another method"
        ) from error
    head.eval()
    mx.eval(head.parameters())
    return head, layers
