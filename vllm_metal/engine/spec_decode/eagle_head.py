# SPDX-License-Identifier: Apache-2.0
"""EAGLE's heads as MLX modules: a decoder layer that reads tokens and the target's hidden states.

EAGLE: Li et al. 2024, arXiv:2401.15077; EAGLE-3: Li et al. 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from vllm_metal.engine.spec_decode.head import Head
from vllm_metal.patches.mlx_patches.seam import AttendingCache

if TYPE_CHECKING:
    from vllm_metal.engine.vision.column import Axes
    from vllm_metal.engine.vision.rotation import Rotation

#: Layers of the target whose output EAGLE-3 reads where config.json names none, counted from 1, as
#: functions of the target's number of layers; the choice of EAGLE-3's authors.
DEFAULT_LAYERS: tuple[Callable[[int], int], ...] = (
    lambda count: 2,
    lambda count: count // 2,
    lambda count: count - 3,
)


@dataclass(frozen=True)
class HeadConfig:
    """The shape of an EAGLE head."""

    decoder: llama.ModelArgs
    draft_vocab_size: int
    # Rotary pairs by time, height and width, and whether they are interleaved; None: a row has one
    # position.
    mrope: tuple[tuple[int, ...], bool] | None
    # The fields below are EAGLE-3's.
    layer_ids: tuple[int, ...] | None  # layers whose hidden states it reads, if it says so
    num_hidden_states: int  # of a row: that many layers'; 0: the final one
    hidden_state_size: int  # the target's
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> HeadConfig:
        """Reads config.json, as vLLM completes it."""
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
        sections = rope.get("mrope_section")
        decoder = llama.ModelArgs.from_dict(
            {**config, "rope_theta": theta, "rope_scaling": rope or None, "layer_types": None}
        )
        eagle = config.get("eagle_config") or {}
        layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get(
            "eagle_aux_hidden_state_layer_ids"
        )
        count = config.get("num_aux_hidden_states") or len(layer_ids or DEFAULT_LAYERS)
        reads_layers = eagle.get("use_aux_hidden_state", True)
        return HeadConfig(
            decoder=decoder,
            draft_vocab_size=config.get("draft_vocab_size") or decoder.vocab_size,
            mrope=(tuple(sections), bool(rope.get("mrope_interleaved"))) if sections else None,
            layer_ids=None if layer_ids is None else tuple(layer_ids),
            num_hidden_states=count if reads_layers else 0,
            hidden_state_size=config.get("target_hidden_size") or decoder.hidden_size,
            norm_before_residual=bool(config.get("norm_before_residual")),
            norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
            fc_norm=bool(config.get("fc_norm")),
            norm_output=bool(config.get("norm_output")),
        )


class _LlamaHead(Head):
    _config: HeadConfig

    def rotate_by_three(self, axes: Axes) -> Rotation | None:
        """Makes the layers rotate by three positions, as the head's config.json says; see Head."""
        if self._config.mrope is None:
            return None
        from vllm_metal.engine.vision import rotation  # nothing of it where text is served

        return rotation.put_in(self, *self._config.mrope)


class EagleHead(_LlamaHead):
    """EAGLE: `fc` joins token embedding and hidden state; decoder layers follow."""

    def __init__(self, config: HeadConfig, names: set[str]) -> None:
        """
        Args:
            config: the head's shape.
            names: names of the arrays in the checkpoint.
        """
        super().__init__()
        args = config.decoder
        size = args.hidden_size
        self._config = config
        self.input_size = size  # of the target's hidden states
        self.fc = nn.Linear(2 * size, size, bias="fc.bias" in names)
        self.layers = [llama.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        self.layers[0]["input_layernorm"] = nn.Identity()
        _own_ends(self, config, names)

    def layer_ids(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers of the target whose hidden states the head reads; None: the final ones."""
        return None

    def __call__(
        self, embeds: mx.array, hidden: mx.array, caches: Sequence[AttendingCache]
    ) -> tuple[mx.array, mx.array]:
        rows = mx.concatenate([embeds, hidden], axis=-1)
        out = self.fc(rows)[:, None]
        for layer, cache in zip(self.layers, caches, strict=True):
            out = layer(out, None, cache)
        return out[:, 0], out[:, 0]


class Eagle3Head(_LlamaHead):
    """EAGLE-3: its first layer reads the embedding and hidden states of several target layers.

    Never drafts tokens that its vocabulary, mapped by `d2t`, leaves out.
    """

    def __init__(self, config: HeadConfig, names: set[str]) -> None:
        super().__init__()
        args = config.decoder
        size, eps = args.hidden_size, args.rms_norm_eps
        self._config = config
        count, width = config.num_hidden_states, config.hidden_state_size
        self.input_size = max(count, 1) * width
        if count:
            self.fc = nn.Linear(self.input_size, size, bias="fc.bias" in names)
            if config.norm_before_fc:
                self.input_norm = nn.RMSNorm(self.input_size, eps)
            if config.fc_norm:
                self.fc_norm = [nn.RMSNorm(width, eps) for _ in range(count)]
        later = [llama.TransformerBlock(args) for _ in range(args.num_hidden_layers - 1)]
        self.layers = [_FirstLayer(args, config.norm_before_residual), *later]
        self.norm = nn.RMSNorm(size, eps)
        if "d2t" in names:
            self.d2t = mx.zeros(config.draft_vocab_size, mx.int32)
        _own_ends(self, config, names)

    def layer_ids(self, num_layers: int) -> tuple[int, ...] | None:
        """Layers of the target whose hidden states the head reads; None: the final ones."""
        if not self._config.num_hidden_states:
            return None
        return self._config.layer_ids or tuple(layer(num_layers) for layer in DEFAULT_LAYERS)

    def combine(self, hidden: mx.array) -> mx.array:
        """Projects the target's hidden states from [T, layers * H] to [T, H]."""
        if "fc" not in self:
            return hidden
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = mx.concatenate(normed, axis=-1)
        return self.fc(hidden)

    def __call__(
        self, embeds: mx.array, hidden: mx.array, caches: Sequence[AttendingCache]
    ) -> tuple[mx.array, mx.array]:
        out = self.layers[0](embeds[:, None], hidden[:, None], caches[0])
        for layer, cache in zip(self.layers[1:], caches[1:], strict=True):
            out = layer(out, None, cache)
        normed = self.norm(out)
        return normed[:, 0], (normed if self._config.norm_output else out)[:, 0]

    def drafted_tokens(self) -> mx.array:
        """[draft V] int32, the target's ids of the tokens that the head can draft."""
        drafted = super().drafted_tokens()
        return drafted + self.d2t if "d2t" in self else drafted

    def tokens(self, out: mx.array) -> mx.array:
        """[N] int32, the likeliest token of each of [N, H] outputs, as the target's ids."""
        found = super().tokens(out)
        if "d2t" in self:  # how far the target's number is from the head's
            found = (found + self.d2t[found]).astype(mx.int32)
        return found


class _FirstLayer(nn.Module):
    def __init__(self, args: llama.ModelArgs, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self._norm_before_residual = norm_before_residual
        self.self_attn = _WideAttention(args)
        self.mlp = llama.MLP(args)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def __call__(self, embeds: mx.array, hidden: mx.array, cache: AttendingCache) -> mx.array:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        both = mx.concatenate([self.input_layernorm(embeds), normed], axis=-1)
        out = residual + self.self_attn(both, None, cache)
        return out + self.mlp(self.post_attention_layernorm(out))


class _WideAttention(llama.Attention):
    """Attention with inputs of twice the hidden size (embedding and hidden state)."""

    def __init__(self, args: llama.ModelArgs) -> None:
        super().__init__(args)
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = self[name].weight.shape[0]
            self[name] = nn.Linear(2 * args.hidden_size, num_outputs, bias=args.attention_bias)


def _own_ends(head: nn.Module, config: HeadConfig, names: set[str]) -> None:
    size = config.decoder.hidden_size
    if "embed_tokens.weight" in names:
        head.embed_tokens = nn.Embedding(config.decoder.vocab_size, size)
    if "lm_head.weight" in names:
        head.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
