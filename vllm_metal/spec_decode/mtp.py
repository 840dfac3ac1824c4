# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: the layer that some models carry to guess one token further.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2. mlx-lm leaves these layers out of its models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.attention.layers import AttentionLayer
from vllm_metal.attention.seam import AttendingCache
from vllm_metal.models import loader, parts
from vllm_metal.models.mtp_families import MTP_FAMILIES, MTPFamily
from vllm_metal.spec_decode.paged_head import HeadNetwork
from vllm_metal.spec_decode.paged_proposer import LAYER_PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MTPHead(nn.Module):
    """Embedding and hidden state, each normed, joined by `fc`, through one decoder layer.

    `embed_tokens` and `lm_head` are the target's.
    """

    def __init__(self, family: MTPFamily, args: Any, block: nn.Module) -> None:
        """
        Args:
            family: of the target.
            args: the target's, as mlx-lm reads them.
            block: the decoder layer.
        """
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self._family = family
        self.input_size = size
        self.embedding_norm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.block = block
        self.norm = nn.RMSNorm(size, eps)

    def combine(self, hidden: mx.array) -> mx.array:
        """See Head."""
        return hidden

    def __call__(
        self, input_ids: mx.array, hidden: mx.array, caches: Sequence[AttendingCache]
    ) -> tuple[mx.array, mx.array]:
        """See Head."""
        embeds = self.embed_tokens(input_ids)
        if self._family.masks_first:  # they are trained without a token there
            embeds = mx.where(caches[0].offset[:, None] == 0, mx.zeros_like(embeds), embeds)
        parts = [self.embedding_norm(embeds), self.hidden_norm(hidden)]
        if self._family.hidden_first:
            parts.reverse()
        out = self.block(self.fc(mx.concatenate(parts, axis=-1))[:, None], None, caches[0])[:, 0]
        normed = self.norm(out)
        return normed, normed if self._family.feeds_normed else out

    def tokens(self, out: mx.array) -> mx.array:
        """See Head."""
        return mx.argmax(self.lm_head(out), axis=-1).astype(mx.int32)


class MTP(HeadNetwork):
    """The target's own MTP layer; the first one where it has several, for every draft."""

    def __init__(self, config: VllmConfig, target: nn.Module, selected: parts.SelectedRows) -> None:
        """Loads it, and has the target's hidden states noted from now on.

        Args:
            config: whose speculative_config names the checkpoint, the target's own by default.
            target: the model it was trained with.
            selected: the target's row selection.

        Raises:
            loader.ModelLoadError: the checkpoint has no MTP layer, or one of another target.
            NotImplementedError: the target does not show its hidden states.
        """
        assert config.speculative_config is not None
        model_config = config.speculative_config.draft_model_config
        (architecture, *_) = model_config.architectures
        family = MTP_FAMILIES[architecture]  # the platform has refused all others
        if loader.model_type(config) != family.model_type:
            raise loader.ModelLoadError(
                f"MTP layers of {model_config.model} ({family.model_type}) do not go with a target "
                f"of {loader.model_type(config)}"
            )
        args = target.args
        block, window = family.build_block(args, model_config.hf_config.to_dict())
        head = MTPHead(family, args, block)
        weights = _weights(config, family, args.num_hidden_layers)
        quantization = getattr(model_config.hf_config, "quantization", None) or {}
        _quantize(head, weights, quantization.get("mode", "affine"))
        try:
            head.load_weights(list(weights.items()))
        except ValueError as error:
            raise loader.ModelLoadError(
                f"the MTP layer of {model_config.model} does not fit the target: {error}"
            ) from error
        mx.eval(head.parameters())
        head.embed_tokens = parts.input_embedding(target)
        head.lm_head = parts.output_head(target)
        layer = AttentionLayer(
            f"{LAYER_PREFIX}layers.0",
            args.num_attention_heads,
            args.num_key_value_heads,
            getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads,
            window,
        )
        last = None if family.reads_normed else (len(target.layers),)
        super().__init__(config, head, [layer], parts.HiddenStates(target, selected, last))


def _weights(config: VllmConfig, family: MTPFamily, num_layers: int) -> dict[str, mx.array]:
    """The layer's arrays by MTPHead's names, experts stacked as mlx-lm's layers have them."""
    assert config.speculative_config is not None
    model_config = config.speculative_config.draft_model_config
    found = loader.load_weights(
        model_config, config, lambda name: family.own_name(name, num_layers) is not None
    )
    if not found:
        raise loader.ModelLoadError(
            f"{model_config.model} carries no MTP layers ({family.prefix.format(num_layers)}*): "
            'most conversions to MLX drop them. Name the original checkpoint as "model" in '
            "--speculative-config, or choose another method"
        )
    weights: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, array in found.items():
        own = family.own_name(name, num_layers)
        assert own is not None
        if expert := re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(.*)", own):
            module, index, part = expert.groups()
            experts.setdefault(f"{module}.switch_mlp.{part}", {})[int(index)] = array
        else:
            weights[own] = array
    return weights | {
        name: mx.stack([arrays[index] for index in sorted(arrays)])
        for name, arrays in experts.items()
    }


def _quantize(head: MTPHead, weights: Mapping[str, mx.array], mode: str) -> None:
    """Makes those modules quantised whose arrays are, at the width and group size these show."""

    def parameters(path: str, module: nn.Module) -> bool | dict[str, Any]:
        scales = weights.get(f"{path}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        size, packed = module["weight"].shape[-1], weights[f"{path}.weight"].shape[-1]
        return {"group_size": size // scales.shape[-1], "bits": packed * 32 // size, "mode": mode}

    nn.quantize(head, class_predicate=parameters)
