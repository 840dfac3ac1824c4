# SPDX-License-Identifier: Apache-2.0
"""Derives config.json and generation_config.json from GGUF metadata."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .family import Family, has_experts
from .family_config import LEFT_OUT
from .names import ROPE_FREQS, has_attention_bias, is_tied, num_layers
from .source import ConversionError, GGUFSource

# Llama 3.1's RoPE rule has four parameters; GGUF only stores the resulting factors. All released
# models of the rule share these three (config.json of Llama 3.1, 3.2 and 3.3).
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Tokens that end a turn or text in released chat models. A GGUF file often declares only one of
# them as its end token; without the others, generation would go on with an invented next turn.
_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
)
_CONTROL = 3  # GGUF token type


def model_config(source: GGUFSource, family: Family, dtype: str) -> dict[str, Any]:
    """Builds config.json without "quantization"; `dtype` is that of the written weights.

    RoPE keys are at the top level, so that both transformers and mlx-lm read them.
    """
    config = _common_keys(source, family) | {"dtype": dtype}
    if family.states_bias:
        config["attention_bias"] = has_attention_bias(source)
    for key, key_of_file in family.keys.items():
        if isinstance(key_of_file, str):
            config[key] = source.require_arch(key_of_file)
        else:
            config[key] = source.arch(*key_of_file)
    config |= family.fixed
    if family.config is not None:
        config |= family.config(source, config)
    _check_sizes(source, family, config)
    for key, name in family.renamed.items():
        value = config.pop(key, LEFT_OUT)
        if name:
            config[name] = value
    config = {key: value for key, value in config.items() if value is not LEFT_OUT}
    for role in ("bos", "eos", "padding"):
        if (token := source.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role.replace('padding', 'pad')}_token_id"] = token
    return config


def _common_keys(source: GGUFSource, family: Family) -> dict[str, Any]:
    """Keys that every family's config.json has, under their usual names."""
    hidden_size = source.require_arch("embedding_length")
    heads = source.require_arch("attention.head_count")
    head_dim = source.arch("attention.key_length", hidden_size // heads if heads else 0)
    kv_heads = source.arch("attention.head_count_kv", heads)
    if isinstance(kv_heads, list) and (family.layers_differ or len(set(kv_heads)) == 1):
        kv_heads = max(kv_heads)  # 0 in layers without attention
    epsilon = source.arch("attention.layer_norm_rms_epsilon")
    if epsilon is None:
        epsilon = source.require_arch("attention.layer_norm_epsilon")
    rotary = source.arch("rope.dimension_count", head_dim)
    if rotary != head_dim and not family.rotates_part:
        raise ConversionError(
            f"{source.path}: rotary embedding over {rotary} of {head_dim} values of a head "
            f"({source.architecture}.rope.dimension_count) cannot be converted"
        )
    config: dict[str, Any] = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": (
            source.arch("feed_forward_length", LEFT_OUT)
            if has_experts(source)
            else source.require_arch("feed_forward_length")
        ),
        "num_hidden_layers": num_layers(source),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": source.require_arch("context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": source.arch("rope.freq_base", 10_000.0),
        "tie_word_embeddings": is_tied(source),
        "hidden_act": "silu",
    }
    if family.rotates_part:
        config["partial_rotary_factor"] = rotary / head_dim
    if not family.own_rope and (scaling := _rope_scaling(source, head_dim, config["rope_theta"])):
        config["rope_scaling"] = scaling
    return config


def generation_config(source: GGUFSource) -> dict[str, Any]:
    """Builds generation_config.json: begin and padding token, and all tokens that end an answer."""
    tokens = source.require("tokenizer.ggml.tokens")
    types = source.get("tokenizer.ggml.token_type", [1] * len(tokens))
    special = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL}
    ends = [source.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    ends += [special.get(token) for token in _END_TOKENS]
    config: dict[str, Any] = {}
    for key, role in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        if (token := source.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[key] = token
    config["eos_token_id"] = list(dict.fromkeys(token for token in ends if token is not None))
    return config


def _check_sizes(source: GGUFSource, family: Family, config: dict[str, Any]) -> None:
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if isinstance(config.get(key), list):
            raise ConversionError(f"{source.path}: layers of different sizes cannot be converted")
    heads, head_dim = config["num_attention_heads"], config.get("head_dim")
    if family.model_type == "qwen2" and head_dim * heads != config["hidden_size"]:
        raise ConversionError(
            f"{source.path}: a qwen2 model needs heads of {config['hidden_size'] // heads} values, "
            f"not {head_dim} (qwen2.attention.key_length)"
        )


def _rope_scaling(source: GGUFSource, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Builds `rope_scaling` of config.json; None if positions are not scaled."""
    if ROPE_FREQS in source.tensors:
        factors = source.tensors[ROPE_FREQS].data.view(np.float32).astype(np.float64).ravel()
        return _llama3_rope(source, factors, head_dim, theta)
    kind = source.arch("rope.scaling.type")
    factor = source.arch("rope.scaling.factor", source.arch("rope.scale_linear"))
    if kind in (None, "none", "linear"):
        if kind == "none" or factor in (None, 0.0, 1.0):
            return None
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor is not None:
        scaling = {"rope_type": "yarn", "factor": factor}
        if original := source.arch("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := source.arch(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
        return scaling
    raise ConversionError(
        f"{source.path}: RoPE scaling {kind!r} ({source.architecture}.rope.scaling.type) cannot be "
        "converted; supported: none, linear, yarn, and Llama 3.1's (rope_freqs.weight)"
    )


def _llama3_rope(
    source: GGUFSource, factors: npt.NDArray[np.float64], head_dim: int, theta: float
) -> dict[str, Any] | None:
    """Derives Llama 3.1's RoPE settings from the file's frequency divisors, (head_dim / 2,).

    Llama 3.1's rule divides the lowest frequencies by the full factor, so the largest divisor is
    the factor. Rejects divisors that the rule with this factor does not give.
    """
    factor = round(float(factors.max()), 4)
    if factor == 1.0:
        return None
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ConversionError(
            f"{source.path}: {ROPE_FREQS} does not follow Llama 3.1's rule with factor {factor} "
            f"and {_LLAMA3_ROPE}; other frequency tables cannot be converted"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
