# SPDX-License-Identifier: Apache-2.0
"""Derives keys that mlx-lm's modules read from other keys of config.json.

transformers 5 renamed keys and omits derivable ones, for which most modules take their own default.
Each row derives one key that modules read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_metal.engine.config_json.rope_parameters import (
    Config,
    by_layer_type,
    rope,
    rotated_share,
    scaling_of,
)
from vllm_metal.identity.model_files import ModelLoadError

#: Sets a key to None.
NOTHING = object()


@dataclass(frozen=True)
class Row:
    """A key that modules read, and the function that derives it from other keys."""

    key: str
    value: Callable[[Config], Any]  # returns None if the config does not determine it
    families: tuple[str, ...] = ()  # modules of mlx-lm; empty: all that read the key
    always: bool = False  # even if the config has the key, which may be stale or in other words
    no_default: bool = False  # only for modules that require the key; others have a better default


def _from_rope(key: str, layer_type: str = "full_attention") -> Callable[[Config], Any]:
    return lambda config: rope(config, layer_type).get(key)


def _copy_of(key: str) -> Callable[[Config], Any]:
    return lambda config: config.get(key)


def _head_dim(config: Config) -> int | None:
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return size // heads if size and heads else None


def _window_letters(config: Config) -> Any:
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
            "needs layers with a window and layers without one"
        )
    return letters


def _lfm2_attention_layers(config: Config) -> list[int]:
    """Returns LFM2's attention layers (by default all); rejects a single layer type."""
    stated, count = config.get("full_attn_idxs"), config["num_hidden_layers"]
    layers = _full_attention_layers(config) or (
        list(range(count)) if stated is None else list(stated)
    )
    if len(layers) in (0, count):
        raise ModelLoadError(
            "layer_types of config.json, or its default, gives all layers the same type, but "
            "mlx-lm's module needs both attention layers and convolution layers"
        )
    return layers


def _full_attention_layers(config: Config) -> list[int] | None:
    """Returns the indices of full-attention layers; None if the config does not state them."""
    types = config.get("layer_types")
    if not types:
        return None
    return [index for index, kind in enumerate(types) if kind == "full_attention"]


def _sparse_layers(config: Config) -> list[bool] | None:
    types = config.get("mlp_layer_types")
    return [kind == "sparse" for kind in types] if types else None


def _num_dense_layers(config: Config) -> int | None:
    """Returns the number of leading dense layers; rejects dense layers after expert layers."""
    sparse = _sparse_layers(config)
    if sparse is None:
        return None
    count = sparse.index(True) if True in sparse else len(sparse)
    if not all(sparse[count:]):
        raise ModelLoadError(
            "mlp_layer_types of config.json has dense layers after expert layers, but mlx-lm's "
            "module supports them only before"
        )
    return count


def _constant(value: Any) -> Callable[[Config], Any]:
    return lambda config: value


def _granite_layer_types(config: Config) -> list[str] | None:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    types = config.get("layer_types")
    return [names.get(kind, kind) for kind in types] if types else None


def _position_embedding_type(config: Config) -> str:
    # Granite hybrids apply RoPE only if config.json says so; null or an omitted key mean no.
    stated = config.get("position_embedding_type")
    return str(stated) if stated in ("rope", "nope") else "nope"


def _ones(key: str, count: int) -> Callable[[Config], Any]:
    return lambda config: config.get(key) or [1.0] * count


def _twice_the_kv_heads(config: Config) -> int | None:
    heads = config.get("num_key_value_heads")
    return None if heads is None else 2 * int(heads)


def _layers_with_windows(config: Config) -> list[int] | None:
    types = config.get("layer_types")
    return [int(kind == "sliding_attention") for kind in types] if types else None


def _layers_of_experts(config: Config) -> list[int] | None:
    sparse = _sparse_layers(config)
    return None if sparse is None else [int(each) for each in sparse]


def _no_shared_factor(config: Config) -> Any:
    # If RoPE differs by layer type, each type's parameters have their own share.
    return NOTHING if by_layer_type(config.get("rope_parameters") or {}) else None


def _full_attention_head_dim(config: Config) -> int | None:
    # transformers 5 sets it per layer; all layers of one type have the same.
    changed, size = config.get("per_layer_config"), config.get("head_dim")
    if changed is None:
        return None
    for index in _full_attention_layers(config) or ():
        size = (changed.get(str(index)) or {}).get("head_dim", size)
    return size


def _expanded_width(config: Config) -> int | None:
    # transformers' Mamba 2 class has a factor in place of the width.
    factor, size = config.get("expand"), config.get("hidden_size")
    return int(factor * size) if factor and size else None


def _last_layer_of_experts(config: Config) -> int | None:
    # In transformers' class, -1 stands for the last layer.
    last = config.get("moe_layer_end_index")
    return config["num_hidden_layers"] - 1 if last == -1 else last


def _ernie_vl_expert_layer(which: int) -> Callable[[Config], int | None]:
    """Returns a row that gives the first (0) or last (-1) layer of experts."""

    def layer(config: Config) -> int | None:
        sparse = _sparse_layers(config)
        if sparse is None:
            is_stated = config.get("moe_layer_start_index") is not None
            # transformers' default: all but the first.
            return None if is_stated else (1, config["num_hidden_layers"] - 1)[which]
        found = [index for index, each in enumerate(sparse) if each]
        if not found or len(found) != found[-1] - found[0] + 1:
            raise ModelLoadError(
                "mlp_layer_types of config.json must have sparse layers, all one after another, "
                "with mlx-vlm's module 'ernie4_5_moe_vl'"
            )
        return found[which]

    return layer


def _mamba_head_dim(config: Config) -> int | None:
    if config.get("mamba_d_head") != "auto":
        return config.get("mamba_d_head")
    width = config.get("mamba_d_ssm")
    if width is None:
        width = config["mamba_expand"] * config["hidden_size"]
    return int(width // config["mamba_n_heads"])


def _rotated_width(config: Config) -> int | None:
    size = config.get("head_dim") or _head_dim(config)
    return int(size * rotated_share(config)) if size else None


def _kimi_linear_attention(config: Config) -> dict[str, Any] | None:
    """Returns Kimi Linear's attention settings, which count layers from 1."""
    types = config.get("layer_types")
    if not types:
        return None
    whole = [index + 1 for index in _full_attention_layers(config) or ()]
    return {
        "full_attn_layers": whole,
        "kda_layers": [n for n in range(1, len(types) + 1) if n not in whole],
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
    }


def _dbrx_attention(config: Config) -> dict[str, Any] | None:
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


def _text_vocab_size(config: Config) -> int | None:
    # mlx-lm's multimodal module reads it in addition to the text configuration.
    return (config.get("text_config") or {}).get("vocab_size")


def _meta_mlp_width(config: Config) -> int | None:
    """Computes the width of a Llama's MLP from the keys of Meta's params.json."""
    size, multiple = config.get("dim"), config.get("multiple_of")
    if not size or not multiple:
        return None
    width = int(int(8 * size / 3) * (config.get("ffn_dim_multiplier") or 1))
    return int(multiple * -(-width // multiple))


def _inkling_expert_width(config: Config) -> int | None:
    """Returns the width of Inkling's experts; None where `intermediate_size` is it.

    Inkling's own files have `intermediate_size` for experts and `dense_intermediate_size` for other
    MLPs; transformers' have `moe_intermediate_size` and `intermediate_size`.
    """
    stated = config.get("dense_intermediate_size") is not None
    return None if stated else config.get("moe_intermediate_size")


def _inkling_dense_width(config: Config) -> int | None:
    stated = config.get("dense_intermediate_size") is not None
    return None if stated else config.get("intermediate_size")


def _mllama_image_layers(config: Config) -> list[int]:
    stated = config.get("cross_attention_layers")
    return list(range(3, 40, 5)) if stated is None else list(stated)  # transformers' default


def _both_mlp_widths(config: Config) -> int | None:
    width = config.get("intermediate_size")  # of each of two projections in one array
    return None if width is None else 2 * int(width)


#: By module, settings that are fixed in transformers' class and therefore absent from its files.
_CHOICES: Mapping[str, Mapping[str, Any]] = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "ernie4_5_moe": {"moe_use_aux_free": True},
    "glm_moe_dsa": {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    "kimi_linear": {"rope_theta": 10000.0},  # positions are not used
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "minimax": {"shared_intermediate_size": 0},
    "mimo_v2_flash": {
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": NOTHING,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    # All of its layers have experts.
    "solar_open": {
        "partial_rotary_factor": 1.0,
        "first_k_dense_replace": 0,
        "intermediate_size": 0,
    },
}
#: Older names, by module and the key that it reads.
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "falcon_ocr": {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "ffn_dim",
        "rms_norm_eps": "norm_eps",
        "max_position_embeddings": "max_seq_len",
    },
    "molmo": {  # mlx-vlm's names are those of the code that trained it
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "mlp_hidden_size": "intermediate_size",
        "max_sequence_length": "max_position_embeddings",
    },
    "llama": {  # Meta's params.json, in files from MLX's first examples
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "rms_norm_eps": "norm_eps",
    },
    "olmo": {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "embedding_size": "vocab_size",
    },
    "qwen": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "n_positions",
    },
}
#: For modules that do not read `rope_parameters` themselves.
ROPE_ROWS: Sequence[Row] = (
    Row("rope_theta", _from_rope("rope_theta")),
    Row("rope_scaling", scaling_of),
    Row("partial_rotary_factor", _from_rope("partial_rotary_factor")),
    Row("rotary_pct", _from_rope("partial_rotary_factor"), ("gpt_neox",)),
    Row("rotary_emb_base", _from_rope("rope_theta"), ("gpt_neox",)),
    Row(
        "original_max_position_embeddings",
        _from_rope("original_max_position_embeddings"),
        ("phi3", "phimoe"),
    ),
    Row("rope_local_base_freq", _from_rope("rope_theta", "sliding_attention")),
    Row("swa_rope_theta", _from_rope("rope_theta", "sliding_attention")),
)
ROWS: Sequence[Row] = (
    Row("head_dim", _head_dim, no_default=True),
    Row("head_dim", _head_dim, ("glm_ocr",)),
    Row("sliding_window_pattern", _window_letters, ("exaone4",), always=True),
    Row("first_k_dense_replace", _num_dense_layers),
    # transformers' classes of these read the list alone if a file has both.
    Row(
        "first_k_dense_replace",
        _num_dense_layers,
        ("deepseek_v32", "glm_moe_dsa", "hy_v4"),
        always=True,
    ),
    Row("is_moe_layer", _sparse_layers),
    Row("mlp_only_layers", _constant([])),
    Row("num_experts", _copy_of("num_local_experts")),
    Row("vocab_size", _text_vocab_size, ("gemma3", "gemma4")),
    Row("n_ctx", _copy_of("n_positions"), ("gpt2",)),
    Row("block_dim", _copy_of("hidden_size"), ("lfm2",)),
    Row("full_attn_idxs", _lfm2_attention_layers, ("lfm2", "lfm2_moe")),
    # transformers' default; no file has mlx-lm's, which differs.
    Row("time_step_limit", _constant((0.0, math.inf)), ("granitemoehybrid",)),
    Row("position_embedding_type", _position_embedding_type, ("granitemoehybrid",), always=True),
    Row("mlp_multipliers", _ones("mlp_multipliers", 2), ("falcon_h1",)),
    Row("ssm_multipliers", _ones("ssm_multipliers", 5), ("falcon_h1",)),
    Row("layer_types", _granite_layer_types, ("granitemoehybrid",), always=True),
    Row("global_head_dim", _full_attention_head_dim, ("gemma4_text",)),
    Row("intermediate_size", _expanded_width, ("mamba2",)),
    Row("intermediate_size", _inkling_expert_width, ("inkling",), always=True),
    Row("dense_intermediate_size", _inkling_dense_width, ("inkling",)),
    Row("moe_layer_end_index", _last_layer_of_experts, ("ernie4_5_moe",), always=True),
    Row("moe_layer_start_index", _ernie_vl_expert_layer(0), ("ernie4_5_moe_vl",)),
    Row("moe_layer_end_index", _ernie_vl_expert_layer(-1), ("ernie4_5_moe_vl",)),
    Row("mamba_d_head", _mamba_head_dim, ("falcon_h1", "granitemoehybrid"), always=True),
    Row("rotary_dim", _rotated_width, ("minimax",)),
    Row("rotary_dim", _rotated_width, ("minimax_m3_vl",), always=True),
    # As transformers' MiMoV2FlashAttention has it.
    Row("swa_num_key_value_heads", _twice_the_kv_heads, ("mimo_v2_flash",)),
    Row("hybrid_layer_pattern", _layers_with_windows, ("mimo_v2_flash",)),
    Row("moe_layer_freq", _layers_of_experts, ("mimo_v2_flash",)),
    *(
        Row(key, _copy_of(name), ("mimo_v2_flash",))
        for key, name in {
            "sliding_window_size": "sliding_window",
            "layernorm_epsilon": "rms_norm_eps",
            "swa_num_attention_heads": "num_attention_heads",
            "swa_head_dim": "head_dim",
            "swa_v_head_dim": "v_head_dim",
        }.items()
    ),
    *(
        Row(key, _copy_of(name), (module,))
        for module, other_names in _OTHER_NAMES.items()
        for key, name in other_names.items()
    ),
    Row("intermediate_size", _meta_mlp_width, ("llama",)),
    Row("partial_rotary_factor", _no_shared_factor, ("laguna",), always=True),
    # transformers' class only clips these weights in training.
    Row("altup_coef_clip", _constant(NOTHING), ("gemma3n",), always=True),
    Row("cross_attention_layers", _mllama_image_layers, ("mllama",)),
    Row("mlp_hidden_size", _both_mlp_widths, ("olmo",)),
    Row("attn_config", _dbrx_attention, ("dbrx",), always=True),
    Row("linear_attn_config", _kimi_linear_attention, ("kimi_linear",)),
    *(
        Row(key, _constant(value), (module,), always=True)
        for module, choices in _CHOICES.items()
        for key, value in choices.items()
    ),
)
