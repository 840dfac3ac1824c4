# SPDX-License-Identifier: Apache-2.0
"""Maps GGUF tensors to mlx-lm's parameter names, row order and column order."""

import numpy as np
import numpy.typing as npt

from .family import Family
from .source import ConversionError, GGUFSource
from .stems import BARE

Order = npt.NDArray[np.intp]
# config.py turns it into rope_scaling; it is not a weight.
ROPE_FREQS = "rope_freqs.weight"
_ATTENTION_INPUTS = ("attn_q", "attn_k", "attn_v")


def served_names(family: Family, source: GGUFSource) -> dict[str, list[str]]:
    """Maps mlx-lm's parameter names to the GGUF names of their parts, for all served tensors.

    Raises ConversionError: the file has a tensor that the family does not have.
    """
    found: dict[str, list[str]] = {}
    layers = num_layers(source)
    order = {stem: index for index, stem in enumerate(family.layer_names)}
    for name in source.tensors:
        if name == ROPE_FREQS or name in family.unused:
            continue
        stem, suffix = parted(name)
        prefix = ""
        if stem.startswith("blk."):
            _, layer, stem = stem.split(".", 2)
            if int(layer) >= layers:
                continue  # draft layer (multi-token prediction)
            prefix, module = f"{family.layers}.{layer}.", family.layer_names.get(stem)
        else:
            module = family.top_names.get(stem)
        if module is None:
            raise ConversionError(
                f"{source.path}: tensor {name} is not supported with {source.architecture}. Serve "
                "the model's checkpoint in safetensors"
            )
        bare = module in BARE or module.rpartition(".")[2] in BARE
        target = f"{prefix}{module}" if bare else f"{prefix}{module}.{suffix or 'weight'}"
        found.setdefault(f"{family.prefix}{target}", []).append(name)
    for names in found.values():
        names.sort(key=lambda name: order.get(stem_of(name), 0))
    return found


def parted(name: str) -> tuple[str, str]:
    """Splits a tensor's name into stem and suffix: "weight", "bias", or "" if it has neither."""
    stem, _, suffix = name.rpartition(".")
    return (stem, suffix) if suffix in ("weight", "bias") else (name, "")


def stem_of(name: str) -> str:
    """Returns a tensor's name without the prefix `blk.N.` and without the suffix (see `parted`)."""
    stem = parted(name)[0]
    return stem.split(".", 2)[2] if stem.startswith("blk.") else stem


def num_layers(source: GGUFSource) -> int:
    """Returns the number of layers, not counting draft layers."""
    return int(source.require_arch("block_count")) - int(source.arch("nextn_predict_layers", 0))


def row_order(family: Family, source: GGUFSource, name: str) -> Order | None:
    """Returns, for each row of the parameter, its row in the file; None for the same order."""
    # RoPE rotates pairs of a head's rows. With `interleaved_rope`, a pair is two neighbors in GGUF,
    # but rows i and i + head_dim / 2 in mlx-lm's models.
    stem = stem_of(name)
    if family.v_heads_tiled and stem in _V_HEAD_STEMS:
        rows = source.tensors[name].shape[0]
        values = _v_head_order(source, 1 if stem in _PER_HEAD else None)
        others = np.arange(rows - len(values))
        return np.concatenate([others, len(others) + np.argsort(values)])
    if not family.interleaved_rope or stem not in ("attn_q", "attn_k"):
        return None
    heads = source.require_arch("attention.head_count")
    if stem == "attn_k":
        heads = source.arch("attention.head_count_kv", heads)
        heads = max(heads) if isinstance(heads, list) else heads
    rows = source.tensors[name].shape[0]
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def joined_order(source: GGUFSource, names: list[str]) -> Order | None:
    """Returns each parameter row's index in the concatenated tensors; None: the same order."""
    # Qwen3-Next's projection groups queries, keys, values and gates by key head; GGUF has those of
    # all heads one after the other.
    if stem_of(names[-1]) != "attn_gate" or len(names) == 1:
        return None
    key_heads = int(source.require_arch("ssm.group_count"))
    keys = key_heads * int(source.require_arch("ssm.state_size"))
    values = int(source.require_arch("ssm.inner_size"))
    ends = np.cumsum([keys, keys, values, values])
    parts = np.split(np.arange(ends[-1]), ends[:-1])
    return np.concatenate([part.reshape(key_heads, -1) for part in parts], axis=1).reshape(-1)


def input_order(family: Family, source: GGUFSource, name: str) -> Order | None:
    """Returns the index of the input that each column of a tensor multiplies; None: in order."""
    return _v_head_order(source) if family.v_heads_tiled and stem_of(name) == "ssm_out" else None


_PER_HEAD = ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
_V_HEAD_STEMS = (*_PER_HEAD, "attn_qkv", "attn_gate", "ssm_conv1d")


def _v_head_order(source: GGUFSource, size: int | None = None) -> Order:
    """Returns the checkpoint's index of each value row in GGUF, for linear attention.

    A key head has several value heads. A checkpoint groups them by key head; GGUF has the first
    value head of each key head, then the second of each.
    """
    key_heads = int(source.require_arch("ssm.group_count"))
    heads = int(source.require_arch("ssm.time_step_rank"))
    size = size or int(source.require_arch("ssm.inner_size")) // heads
    grouped = np.arange(heads * size).reshape(key_heads, heads // key_heads, size)
    return grouped.swapaxes(0, 1).reshape(-1)


def has_attention_bias(source: GGUFSource) -> bool:
    return any(name.endswith(".attn_q.bias") for name in source.tensors)


def is_tied(source: GGUFSource) -> bool:
    """Whether the head shares the embedding's weight: GGUF then has no `output.weight`."""
    return "output.weight" not in source.tensors


def tensor_names(family: Family, source: GGUFSource) -> dict[str, str]:
    """Maps GGUF names to parameter names for all tensors of the model, in file order.

    Raises:
        ConversionError: a tensor is missing or unknown. Either would give a model that runs and
            answers wrongly.
    """
    names = {"token_embd.weight": "model.embed_tokens.weight"}
    names["output_norm.weight"] = "model.norm.weight"
    if not is_tied(source):
        names["output.weight"] = "lm_head.weight"
    biased = set(family.biased)
    if has_attention_bias(source) and not biased:
        biased = {*_ATTENTION_INPUTS, "attn_output"}
    for layer in range(source.require_arch("block_count")):
        for stem, module in family.layer_names.items():
            names[f"blk.{layer}.{stem}.weight"] = f"model.layers.{layer}.{module}.weight"
            if stem in biased:
                names[f"blk.{layer}.{stem}.bias"] = f"model.layers.{layer}.{module}.bias"
    present = [name for name in source.tensors if name != ROPE_FREQS]
    missing = [name for name in names if name not in source.tensors]
    unknown = [name for name in present if name not in names]
    for what, found in (("lacks", missing), ("has unknown", unknown)):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ConversionError(
                f"{source.path}: the file {what} tensors of a {source.architecture} model: "
                f"{', '.join(found[:3])}{more}"
            )
    return {name: names[name] for name in present}
