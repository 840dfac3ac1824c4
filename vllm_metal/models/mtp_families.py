# SPDX-License-Identifier: Apache-2.0
"""MTP layers by family: where a checkpoint keeps its first one, and what that layer computes.

Readable without MLX: only the functions that build a decoder layer import it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.nn as nn

#: Builds the decoder layer from mlx-lm's arguments and config.json: the layer and its sliding
#: window in tokens, None where it attends to everything before it.
BlockBuilder = Callable[[Any, Mapping[str, Any]], "tuple[nn.Module, int | None]"]


@dataclass(frozen=True)
class MTPFamily:
    """Facts about the MTP layers of one family."""

    title: str  # the models' name, for users
    model_type: str  # of the target, in its config.json
    prefix: str  # of the layer's array names; {} stands for the target's number of layers
    #: From the checkpoint's module names to MTPHead's; None marks copies of the target's embedding
    #: and head, which are not loaded. All names not listed are the decoder layer's.
    names: Mapping[str, str | None]
    build_block: BlockBuilder
    hidden_first: bool = False  # `fc` reads the hidden state before the embedding, not after it
    reads_normed: bool = True  # reads the target's states after its last norm, not before it
    feeds_normed: bool = True  # its next pass reads its own output after `norm`, not before it
    masks_first: bool = True  # trained with a zero embedding in the first row of a text

    def own_name(self, name: str, num_layers: int) -> str | None:
        """An array of the checkpoint as MTPHead names it; None: the head does not load it.

        Args:
            name: in the checkpoint.
            num_layers: of the target.
        """
        prefix = self.prefix.format(num_layers)
        if not name.startswith(prefix) or "rotary_emb" in name:
            return None
        rest = name.removeprefix(prefix)
        for theirs, own in self.names.items():
            if rest.startswith(f"{theirs}."):
                return own and own + rest.removeprefix(theirs)
        return f"block.{rest}"


def _mimo_block(args: Any, config: Mapping[str, Any]) -> tuple[nn.Module, int | None]:
    from mlx_lm.models import mimo

    return mimo.TransformerBlock(args), None


def _glm4_moe_block(args: Any, config: Mapping[str, Any]) -> tuple[nn.Module, int | None]:
    from mlx_lm.models import glm4_moe

    return glm4_moe.DecoderLayer(args, args.num_hidden_layers), None


def _exaone_moe_block(args: Any, config: Mapping[str, Any]) -> tuple[nn.Module, int | None]:
    from mlx_lm.models import exaone_moe

    (kind, *_) = config.get("mtp_layer_types") or args.layer_types
    (window, *_) = config.get("mtp_sliding_windows") or [args.sliding_window]
    # Always dense, always with rotary positions, which mlx-lm gives to windowed layers only.
    args = dataclasses.replace(args, layer_types=["sliding_attention"], is_moe_layer=[False])
    return exaone_moe.DecoderLayer(args, 0), None if kind == "full_attention" else window


#: By architecture of the layer, as vLLM names it.
MTP_FAMILIES: Mapping[str, MTPFamily] = {
    "MiMoMTPModel": MTPFamily(
        "MiMo",
        "mimo",
        "model.mtp_layers.0.",
        {
            "token_layernorm": "embedding_norm",
            "hidden_layernorm": "hidden_norm",
            "input_proj": "fc",
            "final_layernorm": "norm",
        },
        _mimo_block,
        hidden_first=True,
        reads_normed=False,
    ),
    "Glm4MoeMTPModel": MTPFamily(
        "GLM-4.5 to 4.7",
        "glm4_moe",
        "model.layers.{}.",
        {
            "enorm": "embedding_norm",
            "hnorm": "hidden_norm",
            "eh_proj": "fc",
            "shared_head.norm": "norm",
            "shared_head.head": None,
            "embed_tokens": None,
        },
        _glm4_moe_block,
        feeds_normed=False,
    ),
    "ExaoneMoeMTP": MTPFamily(
        "K-EXAONE",
        "exaone_moe",
        "mtp.",
        {
            "pre_fc_norm_embedding": "embedding_norm",
            "pre_fc_norm_hidden": "hidden_norm",
            "fc": "fc",
            "norm": "norm",
            "layers.0": "block",
        },
        _exaone_moe_block,
        masks_first=False,
    ),
}
