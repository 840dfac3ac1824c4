# SPDX-License-Identifier: Apache-2.0
"""Makes config.json and generation_config.json from GGUF metadata."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .families import ROPE_FREQS, Family, has_attention_bias, is_tied
from .source import ConversionError, GGUFSource

# Llama 3.1's RoPE rule has four parameters; GGUF keeps only the factors that come out of it. All
# released models of the rule share these three (Llama 3.1, 3.2 and 3.3 config.json).
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GEMMA3_LOCAL_THETA = 10_000.0  # Gemma 3 report, section 2: 10k on local layers, 1M on global ones
_GEMMA3_PATTERN = 6  # same: five local layers to one global
_GEMMA3_27B_LAYERS = 62  # only this size scales queries by hidden_size / heads, not by head_dim
# Tokens that end a turn or a text in released chat models. A GGUF file often declares only one of
# them as its end token; after the others, generation would go on with an invented next turn.
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
    """config.json without its "quantization" entry.

    `dtype` is the element type of the written weights. Both transformers' AutoConfig and
    mlx-lm's ModelArgs read the result; RoPE settings are in the flat form that both take.
    """
    hidden_size = source.require_arch("embedding_length")
    heads = source.require_arch("attention.head_count")
    head_dim = source.arch("attention.key_length", hidden_size // heads)
    _check_heads(source, hidden_size, heads, head_dim)
    config: dict[str, Any] = {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "dtype": dtype,
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": source.require_arch("feed_forward_length"),
        "num_hidden_layers": source.require_arch("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.arch("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.require_arch("context_length"),
        "rms_norm_eps": source.require_arch("attention.layer_norm_rms_epsilon"),
        "rope_theta": source.arch("rope.freq_base", 10_000.0),
        "tie_word_embeddings": is_tied(source),
    }
    if rope_scaling := _rope_scaling(source, head_dim, config["rope_theta"]):
        config["rope_scaling"] = rope_scaling
    if source.architecture == "gemma3":
        config |= _gemma3(source, hidden_size, heads, head_dim)
    else:
        config["hidden_act"] = "silu"
    if source.architecture == "llama":
        config["attention_bias"] = has_attention_bias(source)
    for role in ("bos", "eos", "padding"):
        if (token := source.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role.replace('padding', 'pad')}_token_id"] = token
    return config


def generation_config(source: GGUFSource) -> dict[str, Any]:
    """generation_config.json: begin token, padding token, and all tokens that end an answer."""
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


def _check_heads(source: GGUFSource, hidden_size: int, heads: int, head_dim: int) -> None:
    if isinstance(heads, list) or isinstance(source.arch("feed_forward_length"), list):
        raise ConversionError(f"{source.path}: layers of different sizes cannot be converted")
    rotary = source.arch("rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise ConversionError(
            f"{source.path}: rotary embedding over {rotary} of {head_dim} values of a head "
            f"({source.architecture}.rope.dimension_count) cannot be converted"
        )
    if source.architecture == "qwen2" and head_dim * heads != hidden_size:
        raise ConversionError(
            f"{source.path}: a qwen2 model needs heads of {hidden_size // heads} values, not "
            f"{head_dim} (qwen2.attention.key_length)"
        )


def _rope_scaling(source: GGUFSource, head_dim: int, theta: float) -> dict[str, Any] | None:
    """rope_scaling of config.json, or None where positions are not scaled."""
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
    """The Llama 3.1 settings that give these frequency divisors, (head_dim / 2,).

    The rule divides the lowest frequencies by its full factor, so that is the largest divisor. We
    then compute all divisors by the rule and compare them with the file's.
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


def _gemma3(source: GGUFSource, hidden_size: int, heads: int, head_dim: int) -> dict[str, Any]:
    layers = source.require_arch("block_count")
    pattern = source.arch("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if not isinstance(pattern, int):
        # One flag a layer: true is local. mlx-lm takes a period, so the flags must have one.
        flags = [bool(flag) for flag in pattern]
        pattern = flags.index(False) + 1 if False in flags else layers + 1
        if flags != [(i + 1) % pattern != 0 for i in range(layers)]:
            raise ConversionError(
                f"{source.path}: gemma3.attention.sliding_window_pattern has no fixed period, "
                "which mlx-lm's gemma3 needs"
            )
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden_size // heads if layers == _GEMMA3_27B_LAYERS else head_dim,
        "sliding_window": source.require_arch("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)
        ],
        "rope_local_base_freq": source.arch("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
    }
