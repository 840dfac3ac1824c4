# SPDX-License-Identifier: Apache-2.0
"""Functions that derive the value of a key of config.json from other keys, for `config_rows`.

Each takes a config, and returns None if the config does not determine the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_metal.engine.config_json.rope_parameters import (
    Config,
    by_layer_type,
    rope,
    rotated_share,
)
from vllm_metal.identity.model_files import ModelLoadError

#: Sets a key to None.
NOTHING = object()


def from_rope(key: str, layer_type: str = "full_attention") -> Callable[[Config], Any]:
    return lambda config: rope(config, layer_type).get(key)


def copy_of(key: str) -> Callable[[Config], Any]:
    return lambda config: config.get(key)


def head_dim(config: Config) -> int | None:
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return size // heads if size and heads else None


def window_letters(config: Config) -> Any:
    """Returns a letter per layer, L with a sliding window or G; rejects configs with only one."""
    types, window = config.get("layer_types"), config.get("sliding_window")
    every = config.get("sliding_window_pattern")
    if types:
        letters = "".join("G" if kind == "full_attention" else "L" for kind in types)
    elif isinstance(every, int):  # the last of every so many layers has no window
        layers = range(1, config.get("num_hidden_layers", 0) + 1)
        letters = "".join("L" if window and index % every else "G" for index in layers)
    else:
        return None
    if "L" not in letters and window is None:
        return NOTHING  # the module then applies RoPE in all layers, whatever their type
    if len(set(letters)) == 1:
        raise ModelLoadError(
            f"config.json gives {'all' if 'L' in letters else 'no'} layers a window (layer_types "
            f"or sliding_window_pattern, with sliding_window={window!r}), but mlx-lm's module "
            "needs layers of both kinds. Choose another checkpoint"
        )
    return letters


def lfm2_attention_layers(config: Config) -> list[int]:
    """Returns LFM2's attention layers (by default all); rejects a single layer type."""
    stated, count = config.get("full_attn_idxs"), config["num_hidden_layers"]
    layers = full_attention_layers(config) or (
        list(range(count)) if stated is None else list(stated)
    )
    if len(layers) in (0, count):
        raise ModelLoadError(
            "config.json gives all layers one type (layer_types, or its default), but mlx-lm's "
            "module needs both attention and convolution layers. Choose another checkpoint"
        )
    return layers


def full_attention_layers(config: Config) -> list[int] | None:
    """Returns the indices of full-attention layers; None if the config does not state them."""
    types = config.get("layer_types")
    if not types:
        return None
    return [index for index, kind in enumerate(types) if kind == "full_attention"]


def sparse_layers(config: Config) -> list[bool] | None:
    types = config.get("mlp_layer_types")
    return [kind == "sparse" for kind in types] if types else None


def num_dense_layers(config: Config) -> int | None:
    """Returns the number of leading dense layers; rejects dense layers after expert layers."""
    sparse = sparse_layers(config)
    if sparse is None:
        return None
    count = sparse.index(True) if True in sparse else len(sparse)
    if not all(sparse[count:]):
        raise ModelLoadError(
            "config.json has dense layers after expert layers (mlp_layer_types), but mlx-lm's "
            "module supports them only before. Choose another checkpoint"
        )
    return count


def constant(value: Any) -> Callable[[Config], Any]:
    return lambda config: value


def granite_layer_types(config: Config) -> list[str] | None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    types = config.get("layer_types")
    return [names.get(kind, kind) for kind in types] if types else None


def position_embedding_type(config: Config) -> str:
    # Granite hybrids apply RoPE only if config.json says so; null or an omitted key mean no.
    stated = config.get("position_embedding_type")
    return str(stated) if stated in ("rope", "nope") else "nope"


def ones(key: str, count: int) -> Callable[[Config], Any]:
    return lambda config: config.get(key) or [1.0] * count


def twice_the_kv_heads(config: Config) -> int | None:
    heads = config.get("num_key_value_heads")
    return None if heads is None else 2 * int(heads)


def layers_with_windows(config: Config) -> list[int] | None:
    types = config.get("layer_types")
    return [int(kind == "sliding_attention") for kind in types] if types else None


def layers_of_experts(config: Config) -> list[int] | None:
    sparse = sparse_layers(config)
    return None if sparse is None else [int(each) for each in sparse]


def no_shared_factor(config: Config) -> Any:
    # If RoPE differs by layer type, each type's parameters have their own share.
    return NOTHING if by_layer_type(config.get("rope_parameters") or {}) else None


def full_attention_head_dim(config: Config) -> int | None:
    # transformers 5 sets it per layer; all layers of one type have the same.
    changed, size = config.get("per_layer_config"), config.get("head_dim")
    if changed is None:
        return None
    for index in full_attention_layers(config) or ():
        size = (changed.get(str(index)) or {}).get("head_dim", size)
    return size


def expanded_width(config: Config) -> int | None:
    # transformers' Mamba 2 class has a factor in place of the width.
    factor, size = config.get("expand"), config.get("hidden_size")
    return int(factor * size) if factor and size else None


def last_layer_of_experts(config: Config) -> int | None:
    # In transformers' class, -1 stands for the last layer.
    last = config.get("moe_layer_end_index")
    return config["num_hidden_layers"] - 1 if last == -1 else last


def ernie_vl_expert_layer(which: int) -> Callable[[Config], int | None]:
    """Returns a row that gives the first (0) or last (-1) layer of experts."""

    def layer(config: Config) -> int | None:
        sparse = sparse_layers(config)
        if sparse is None:
            is_stated = config.get("moe_layer_start_index") is not None
            # transformers' default: all but the first.
            return None if is_stated else (1, config["num_hidden_layers"] - 1)[which]
        found = [index for index, each in enumerate(sparse) if each]
        if not found or len(found) != found[-1] - found[0] + 1:
            raise ModelLoadError(
                "config.json must have sparse layers in one unbroken range (mlp_layer_types) with "
                "mlx-vlm's module 'ernie4_5_moe_vl'. Choose another checkpoint"
            )
        return found[which]

    return layer


def mamba_head_dim(config: Config) -> int | None:
    if config.get("mamba_d_head") != "auto":
        return config.get("mamba_d_head")
    width = config.get("mamba_d_ssm")
    if width is None:
        width = config["mamba_expand"] * config["hidden_size"]
    return int(width // config["mamba_n_heads"])


def rotated_width(config: Config) -> int | None:
    size = config.get("head_dim") or head_dim(config)
    return int(size * rotated_share(config)) if size else None


def kimi_linear_attention(config: Config) -> dict[str, Any] | None:
    """Returns Kimi Linear's attention settings, which count layers from 1."""
    types = config.get("layer_types")
    if not types:
        return None
    whole = [index + 1 for index in full_attention_layers(config) or ()]
    return {
        "full_attn_layers": whole,
        "kda_layers": [n for n in range(1, len(types) + 1) if n not in whole],
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
    }


def dbrx_attention(config: Config) -> dict[str, Any] | None:
    """Returns DBRX's `attn_config` with RoPE's base, which older files have there."""
    own, theta = config.get("attn_config"), rope(config).get("rope_theta")
    if own is None or theta is None:
        return None
    if own.get("rope_theta", theta) != theta:
        raise ModelLoadError(
            f"config.json sets rope_theta={own['rope_theta']!r} in attn_config, but "
            f"{theta!r} in rope_parameters: make them equal"
        )
    return {**own, "rope_theta": theta}


def text_vocab_size(config: Config) -> int | None:
    # mlx-lm's multimodal module reads it in addition to the text configuration.
    return (config.get("text_config") or {}).get("vocab_size")


def meta_mlp_width(config: Config) -> int | None:
    """Computes the width of a Llama's MLP from the keys of Meta's params.json."""
    size, multiple = config.get("dim"), config.get("multiple_of")
    if not size or not multiple:
        return None
    width = int(int(8 * size / 3) * (config.get("ffn_dim_multiplier") or 1))
    return int(multiple * -(-width // multiple))


def inkling_expert_width(config: Config) -> int | None:
    """Returns the width of Inkling's experts; None where `intermediate_size` is it.

    Inkling's own files have `intermediate_size` for experts and `dense_intermediate_size` for other
    MLPs; transformers' have `moe_intermediate_size` and `intermediate_size`.
    """
    stated = config.get("dense_intermediate_size") is not None
    return None if stated else config.get("moe_intermediate_size")


def inkling_dense_width(config: Config) -> int | None:
    stated = config.get("dense_intermediate_size") is not None
    return None if stated else config.get("intermediate_size")


def mllama_image_layers(config: Config) -> list[int]:
    stated = config.get("cross_attention_layers")
    return list(range(3, 40, 5)) if stated is None else list(stated)  # transformers' default


def both_mlp_widths(config: Config) -> int | None:
    width = config.get("intermediate_size")  # of each of two projections in one array
    return None if width is None else 2 * int(width)


def jina_head_dim(config: Config) -> int | None:
    heads = config.get("block_config.attn_config.n_heads")
    stated = config.get("block_config.attn_config.head_dim")
    return stated or (config["hidden_size"] // heads if heads else None)


def jina_kv_heads(config: Config) -> int | None:
    heads = config.get("block_config.attn_config.n_heads")
    return config.get("block_config.attn_config.n_kv_heads") or heads


def jina_mlp_width(config: Config) -> int:
    ratio = config["block_config.ffn_config.ratio"]
    return config.get("block_config.ffn_config.size") or int(ratio * config["hidden_size"])
