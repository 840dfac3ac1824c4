# SPDX-License-Identifier: Apache-2.0
"""Describes MTP layers by family: their array names in a checkpoint, and their parts.

Does not need MLX; only the functions that build a decoder layer import it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.nn as nn

#: Builds the decoder layer of an MTP layer from mlx-lm's arguments, config.json and the MTP layer's
#: index: the layer and its sliding window in tokens, or None without a window.
BlockBuilder = Callable[[Any, Mapping[str, Any], int], "tuple[nn.Module, int | None]"]


#: Parts of an MTP layer beside its decoder layer, as MTPHead names them.
ENDS = ("embedding_norm", "hidden_norm", "fc", "norm")
#: Conversions of a multimodal checkpoint put this before the names of its text model.
_OF_TEXT = "language_model."


@dataclass(frozen=True)
class MTPFamily:
    """The MTP layers of one model family: their array names and computation."""

    title: str  # the models' name, for users
    model_types: tuple[str, ...]  # of target models, in their config.json
    #: Of a layer's array names; {} is replaced by its index, counted from the target's first layer.
    prefix: str
    #: From the checkpoint's module names to MTPHead's; None marks copies of the target's embedding
    #: and head, which are not loaded. Unlisted names belong to the decoder layer.
    names: Mapping[str, str | None]
    build_block: BlockBuilder
    #: The same for a folder that mlx-vlm has split from a checkpoint; None: those of `names`.
    split_names: Mapping[str, str | None] | None = None
    hidden_first: bool = False  # `fc` reads the hidden state before the embedding, not after it
    reads_normed: bool = True  # reads the target's states after its last norm, not before it
    feeds_normed: bool = True  # its next pass reads its own output after `norm`, not before it
    masks_first: bool = True  # trained with a zero embedding at the first position of a text
    #: Of several layers in a checkpoint, layer i drafts token i, as vLLM computes it
    #: (`multi_module_mtp`). In the other families vLLM runs the first layer alone.
    one_per_draft: bool = False
    #: Checkpoints store norm weights minus one. mlx-lm adds one when it reads such a checkpoint,
    #: and conversions have it added.
    norms_from_zero: bool = False

    @property
    def shares_ends(self) -> bool:
        """Whether all MTP layers of a checkpoint have the same ENDS."""
        return "{}" not in self.prefix

    def num_drafting(self, depth: int, is_split: bool) -> int:
        """Returns how many of a checkpoint's MTP layers draft a token each; 1: the first does all.

        Args:
            depth: number of MTP layers that config.json states.
            is_split: whether the checkpoint is a folder that mlx-vlm has split from another.
        """
        return depth if self.one_per_draft and depth and not is_split else 1

    def own_name(
        self, name: str, num_layers: int, is_split: bool = False, index: int = 0
    ) -> str | None:
        """Returns an array's name in MTPHead, or None if the head does not load it.

        Args:
            name: the array's name in the checkpoint.
            num_layers: the target's.
            is_split: whether the checkpoint is a folder that mlx-vlm has split from another.
            index: of the MTP layer.
        """
        prefix, names = self.prefix.format(num_layers + index), self.names
        if is_split:
            prefix, names = "", self.split_names or names
        name = name.removeprefix(_OF_TEXT)
        if not name.startswith(prefix) or "rotary_emb" in name:
            return None
        rest = name.removeprefix(prefix)
        for theirs, own in names.items():
            if rest.startswith(f"{theirs.format(index)}."):
                return own and own + rest.removeprefix(theirs.format(index))
        return f"block.{rest}"


def _mimo_block(args: Any, config: Mapping[str, Any], _: int) -> tuple[nn.Module, int | None]:
    from mlx_lm.models import mimo

    return mimo.TransformerBlock(args), None


def _one_more(module: str, name: str) -> BlockBuilder:
    # Builds one more of the target's layers, always with full attention.

    def build(args: Any, config: Mapping[str, Any], index: int) -> tuple[nn.Module, int | None]:
        layer = getattr(import_module(f"mlx_lm.models.{module}"), name)
        place = args.num_hidden_layers + index
        if (kinds := getattr(args, "layer_types", None)) is not None:
            more = ["full_attention"] * (index + 1)
            args = dataclasses.replace(args, layer_types=[*kinds, *more])
        return layer(args, place), None

    return build


def _exaone_moe_block(
    args: Any, config: Mapping[str, Any], index: int
) -> tuple[nn.Module, int | None]:
    from mlx_lm.models import exaone_moe

    kind = (config.get("mtp_layer_types") or args.layer_types)[index]
    windows = config.get("mtp_sliding_windows")
    window = windows[index] if windows else args.sliding_window
    # Always dense and with rotary positions, which mlx-lm only gives to windowed layers.
    args = dataclasses.replace(args, layer_types=["sliding_attention"], is_moe_layer=[False])
    return exaone_moe.DecoderLayer(args, 0), None if kind == "full_attention" else window


#: Names in families whose MTP layer is one more of the target's layers.
_ONE_MORE_LAYER = {
    "enorm": "embedding_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": None,
    "embed_tokens": None,
}
#: The same as mlx-vlm's splitter has them.
_ONE_MORE_LAYER_SPLIT = {
    "model.enorm": "embedding_norm",
    "model.hnorm": "hidden_norm",
    "model.eh_proj": "fc",
    "model.shared_head_norm": "norm",
    "model.mtp_block": "block",
    "lm_head": None,
    "model.embed_tokens": None,
}
#: Names in families that store it separately.
_APART = {
    "pre_fc_norm_embedding": "embedding_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "fc": "fc",
    "norm": "norm",
    "layers.{}": "block",
    "layers": None,  # other MTP layers'
}


def _qwen3_5(title: str, model_type: str) -> MTPFamily:
    return MTPFamily(
        title,
        (model_type, f"{model_type}_text"),
        "mtp.",
        _APART,
        _one_more("qwen3_5", "DecoderLayer"),
        masks_first=False,
        norms_from_zero=True,
    )


#: MTP families by the architecture of the layer, as vLLM names it.
MTP_FAMILIES: Mapping[str, MTPFamily] = {
    "MiMoMTPModel": MTPFamily(
        "MiMo",
        ("mimo",),
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
        ("glm4_moe",),
        "model.layers.{}.",
        _ONE_MORE_LAYER,
        _one_more("glm4_moe", "DecoderLayer"),
        feeds_normed=False,
        one_per_draft=True,
    ),
    "Glm4MoeLiteMTPModel": MTPFamily(
        "GLM-4.7-Flash",
        ("glm4_moe_lite",),
        "model.layers.{}.",
        _ONE_MORE_LAYER,
        _one_more("glm4_moe_lite", "Glm4MoeLiteDecoderLayer"),
        split_names=_ONE_MORE_LAYER_SPLIT,
        feeds_normed=False,
        one_per_draft=True,
    ),
    "DeepSeekMTPModel": MTPFamily(
        "DeepSeek-V3",
        ("deepseek_v3",),
        "model.layers.{}.",
        _ONE_MORE_LAYER,
        _one_more("deepseek_v3", "DeepseekV3DecoderLayer"),
        one_per_draft=True,
    ),
    "ExaoneMoeMTP": MTPFamily(
        "K-EXAONE",
        ("exaone_moe",),
        "mtp.",
        _APART,
        _exaone_moe_block,
        masks_first=False,
        one_per_draft=True,
    ),
    "Qwen3NextMTP": MTPFamily(
        "Qwen3-Next",
        ("qwen3_next",),
        "mtp.",
        _APART,
        _one_more("qwen3_next", "Qwen3NextDecoderLayer"),
        masks_first=False,
        norms_from_zero=True,
    ),
    "Qwen3_5MTP": _qwen3_5("Qwen3.5", "qwen3_5"),
    "Qwen3_5MoeMTP": _qwen3_5("Qwen3.5 MoE", "qwen3_5_moe"),
}
