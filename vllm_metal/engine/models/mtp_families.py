# SPDX-License-Identifier: Apache-2.0
"""Describes MTP layers by family: their array names in a checkpoint, and their parts.

Does not need MLX; only the functions that build a decoder layer import it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.nn as nn

#: Builds the decoder layer of an MTP layer from mlx-lm's arguments, config.json and the MTP layer's
#: index: the layer, and the sliding window in tokens of each attention in it, or None without one.
Built = tuple["nn.Module", tuple[int | None, ...]]
BlockBuilder = Callable[[Any, Mapping[str, Any], int], Built]


#: Parts of an MTP layer beside its decoder layer, as MTPHead names them.
ENDS = ("embedding_norm", "hidden_norm", "fc", "norm")
#: Conversions of a multimodal checkpoint put this before the names of its text model.
_OF_TEXT = "language_model."
#: Inkling's object of keys of MTP layers in config.json.
_NESTED = "mtp_config"


@dataclass(frozen=True)
class MTPFamily:
    """The MTP layers of one model family: their array names and computation."""

    title: str  # the models' name, for users
    model_types: tuple[str, ...]  # model_type of target models, in their config.json
    #: Prefix of a layer's array names; {} becomes its index, counted from the target's first layer.
    prefix: str
    #: From the checkpoint's module names, with * for any number, to MTPHead's; None marks copies of
    #: the target's embedding and head, which are not loaded. Unlisted names belong to the decoder
    #: layer.
    names: Mapping[str, str | None]
    build_block: BlockBuilder
    #: The same for a folder that mlx-vlm has split from a checkpoint; None: those of `names`.
    split_names: Mapping[str, str | None] | None = None
    hidden_first: bool = False  # `fc` reads the hidden state before the embedding, not after it
    reads_normed: bool = True  # reads the target's states after its last norm, not before it
    norms_states: bool = False  # the target's module returns its states before its last norm
    feeds_normed: bool = True  # its next pass reads its own output after `norm`, not before it
    masks_first: bool = True  # trained with a zero embedding at the first position of a text
    #: Layer i of several in a checkpoint drafts token i, as vLLM computes it
    #: (`multi_module_mtp`). In the other families vLLM runs the first layer alone.
    one_per_draft: bool = False
    #: Checkpoints store norm weights minus one. mlx-lm adds one when it reads such a checkpoint,
    #: and conversions have it added.
    norms_from_zero: bool = False
    #: Its decoder layer is a LayerStack; the checkpoint numbers the layers in it.
    is_stack: bool = False
    #: vLLM's class takes a checkpoint only if its config.json states one MTP layer.
    has_one_layer: bool = False
    eps: str = "rms_norm_eps"  # mlx-lm's argument with the epsilon of the norms
    #: Parts that all MTP layers of a checkpoint share, unless `numbers_on`.
    shared: tuple[str, ...] = ENDS
    #: Key of config.json that is true if the layers have `norm`; None: they have.
    norm_key: str | None = None
    #: Prefix of a regular layer's names, as the family reads them in published files; None: the
    #: module's own.
    published: str | None = None
    #: Drafts by default, if a layer drafts a single token even in a checkpoint without others;
    #: None: such a layer drafts all tokens.
    default_drafts: int | None = None
    #: Known keys of `mtp_config` in config.json, an object with the keys of the MTP layers.
    keys: tuple[str, ...] = ()

    @property
    def numbers_on(self) -> bool:
        """Whether MTP layers have the numbers after the target's; each has ENDS of its own then."""
        return "{}" in self.prefix

    def takes(self, depth: int) -> bool:
        """Whether a checkpoint with this number of MTP layers is supported."""
        return depth == 1 or not self.has_one_layer

    def unknown_key(self, content: Mapping[str, Any]) -> str | None:
        """Returns the key and value in a config.json that says how MTP layers compute, and that is
        not supported; None: there is none."""
        given = content.get(_NESTED) or {}
        if self.keys and (unknown := [key for key in given if key not in self.keys]):
            return f"{_NESTED}.{unknown[0]}={given[unknown[0]]}"
        return None

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
            num_layers: number of the target's layers.
            is_split: whether the checkpoint is a folder that mlx-vlm has split from another.
            index: index of the MTP layer.
        """
        prefix, names = self.prefix.format(num_layers + index), self.names
        if is_split:
            prefix, names = "", self.split_names or names
        name = name.removeprefix(_OF_TEXT)
        if not name.startswith(prefix) or "rotary_emb" in name:
            return None
        rest = name.removeprefix(prefix)
        for theirs, own in names.items():
            module = re.escape(theirs.format(index)).replace(r"\*", r"\d+")
            if (found := re.match(rf"{module}(?=\.)", rest)) is not None:
                return own and own + rest[found.end() :]
        return f"block.{rest}"


def mtp_keys(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json with the keys of MTP layers: vLLM moves them from `mtp_config`."""
    return content.get(_NESTED) or content


def _mimo_block(args: Any, config: Mapping[str, Any], _: int) -> Built:
    from mlx_lm.models import mimo

    return mimo.TransformerBlock(args), (None,)


def _one_more(module: str, name: str) -> BlockBuilder:
    # Builds one more of the target's layers, always with full attention.

    def build(args: Any, config: Mapping[str, Any], index: int) -> Built:
        layer = getattr(import_module(f"mlx_lm.models.{module}"), name)
        place = args.num_hidden_layers + index
        if (kinds := getattr(args, "layer_types", None)) is not None:
            more = ["full_attention"] * (index + 1)
            args = dataclasses.replace(args, layer_types=[*kinds, *more])
        return layer(args, place), (None,)

    return build


def _exaone_moe_block(args: Any, config: Mapping[str, Any], index: int) -> Built:
    from mlx_lm.models import exaone_moe

    kind = (config.get("mtp_layer_types") or args.layer_types)[index]
    windows = config.get("mtp_sliding_windows")
    window = windows[index] if windows else args.sliding_window
    # Always dense and with rotary positions, which mlx-lm only gives to windowed layers.
    args = dataclasses.replace(args, layer_types=["sliding_attention"], is_moe_layer=[False])
    return exaone_moe.DecoderLayer(args, 0), (None if kind == "full_attention" else window,)


def _inkling_block(args: Any, config: Mapping[str, Any], index: int) -> Built:
    # Dense, with full or windowed attention. As in vLLM's class, and unlike in the target, scores
    # do not grow with the position (`log_scaling_n_floor`).
    from vllm_metal.engine.models.convolved_layer import ConvolvedLayer

    language = import_module("mlx_vlm.models.inkling.language")
    is_local = index in (mtp_keys(config).get("local_layer_ids") or ())
    args = dataclasses.replace(
        args,
        layer_types=["hybrid_sliding" if is_local else "hybrid"],
        mlp_layer_types=["dense"],
        log_scaling_n_floor=None,
    )
    layer = language.InklingDecoderLayer(args, 0)
    return ConvolvedLayer(layer), (args.sliding_window_size if is_local else None,)


_PATTERN = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
#: Other keys of Nemotron-H's config.json about MTP: of training, and its depth in split folders.
_BESIDE_PATTERN = ("mtp_loss_scaling_factor", "mtp_num_hidden_layers")


def _nemotron_h_block(args: Any, config: Mapping[str, Any], _: int) -> Built:
    from mlx_lm.models.nemotron_h import NemotronHBlock

    from vllm_metal.engine.models.layer_stack import LayerStack

    known = (*_PATTERN, *_BESIDE_PATTERN)
    if unknown := [key for key in config if key.startswith("mtp_") and key not in known]:
        raise NotImplementedError(f"has {unknown[0]}={config[unknown[0]]}, which is not supported")
    pattern = _nemotron_h_pattern(config)
    stack = LayerStack([NemotronHBlock(args, kind) for kind in pattern])
    return stack, (config.get("sliding_window"),) * pattern.count("*")


def _nemotron_h_pattern(config: Mapping[str, Any]) -> str:
    # The layers of the MTP layer, * for attention and E for MoE, as vLLM's class takes them of
    # transformers' configuration.
    from transformers import NemotronHConfig

    given = {key: config[key] for key in _PATTERN if config.get(key) is not None}
    try:
        pattern: str = NemotronHConfig(**given).mtp_hybrid_override_pattern
    except KeyError:
        pattern = ""
    if not set("*") <= set(pattern) <= set("*E"):
        stated = ", ".join(f"{key}={value}" for key, value in given.items())
        raise NotImplementedError(
            f"has {stated}, which is not supported: it needs attention layers, and MoE layers may "
            "follow them"
        )
    return pattern


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
    "NemotronHMTPModel": MTPFamily(
        "Nemotron-H",
        ("nemotron_h",),
        "mtp.",
        {
            "layers.0.enorm": "embedding_norm",
            "layers.0.hnorm": "hidden_norm",
            "layers.0.eh_proj": "fc",
            "layers.*.final_layernorm": "norm",  # of the last one
        },
        _nemotron_h_block,
        masks_first=False,
        is_stack=True,
        has_one_layer=True,
        eps="layer_norm_epsilon",
    ),
    # vLLM's class, transformers' MtpModel and mlx-vlm's drafter agree on the arrays, but not on the
    # norms. This follows vLLM, whose acceptance is the highest on published weights: a layer reads
    # embeddings as the target's first layer does, after its `embed_norm` (transformers and mlx-vlm
    # leave that out), and hidden states after the target's last norm; the head reads a layer's
    # output without the target's norm (mlx-vlm applies it).
    "InklingMTPModel": MTPFamily(
        "Inkling",
        ("inkling_mm_model",),
        "model.mtp.",
        {
            "layers.{}.embed_norm": "embedding_norm",
            "layers.{}.hidden_norm": "hidden_norm",
            "layers.{}.input_proj": "fc",
            "layers.{}.transformer_block": "block.layer",
            "layers": None,  # other MTP layers'
            "chain_norm": "norm",
        },
        _inkling_block,
        hidden_first=True,
        norms_states=True,
        masks_first=False,
        one_per_draft=True,
        shared=("norm",),
        norm_key="chain_hidden_post_norm",
        published="model.llm.layers.0.",
        # Checkpoints have eight, and few texts have so many drafts accepted at once.
        default_drafts=3,
        keys=("num_nextn_predict_layers", "local_layer_ids", "chain_hidden_post_norm"),
    ),
}
