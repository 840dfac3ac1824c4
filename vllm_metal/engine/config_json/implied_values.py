# SPDX-License-Identifier: Apache-2.0
"""Keys that modules do not read, but that follow from keys they do read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from vllm_metal.engine.config_json.rope_parameters import Config, rotated_share

Follows = Callable[[Config], Any]
#: Families whose window only applies if `use_sliding_window` is set (transformers' configurations).
_SWITCHED = frozenset(("qwen2", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "smollm3"))


def _key(name: str, times: int = 1) -> Follows:
    return lambda config: config[name] * times


def _head_dim(config: Config) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def _mamba_expand(config: Config) -> float:
    return float(config["mamba_n_heads"] * config["mamba_d_head"] / config["hidden_size"])


def _mamba2_expand(config: Config) -> float:
    return float(config["num_heads"] * config["head_dim"] / config["hidden_size"])


def _mla_head_dim(config: Config) -> int:
    return int(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])


def _all(value: Any) -> Follows:
    return lambda config: [value] * config["num_hidden_layers"]


def _all_indexed(config: Config) -> list[str]:
    """Returns the stated kinds of layers if all of them choose positions by an indexer."""
    stated = config["layer_types"]
    every = [[kind] * config["num_hidden_layers"] for kind in _INDEXED]
    return stated if stated in every else every[0]


def _rotated_width(config: Config) -> int:
    return int(config["head_dim"] * rotated_share(config))


def _full_attention_share(config: Config) -> float:
    return float(config["rope_parameters"]["full_attention"]["partial_rotary_factor"])


def _llama4_rope_layers(config: Config) -> list[int]:
    # transformers' Llama 4 class takes an empty list for RoPE in three of four layers.
    return config["no_rope_layers"] and [
        int((index + 1) % 4 != 0) for index in range(config["num_hidden_layers"])
    ]


#: Layers with an indexer, as transformers names them, has named them, and vLLM also reads.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention", "sparse_attention", "sparse")
_LATENT: dict[str, Follows] = {
    "head_dim": _key("qk_rope_head_dim"),
    "num_key_value_heads": _key("num_attention_heads"),
}
#: Required values by module and key, whether or not the module names the key.
_FOLLOWS: Mapping[str, Mapping[str, Follows]] = {
    "bailing_moe_v3": {"num_key_value_heads": _key("num_attention_heads")},
    "dbrx": {"num_key_value_heads": lambda config: config["attn_config"]["kv_n_heads"]},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"layer_types": _all_indexed},
    "falcon_h1": {"mamba_expand": _mamba_expand},
    "gemma4_text": {"global_partial_rotary_factor": _full_attention_share},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT | {"layer_types": _all_indexed},
    "gpt2": {"n_ctx": _key("n_positions"), "n_inner": _key("n_embd", 4)},
    "gpt_neox": {
        "intermediate_size": _key("hidden_size", 4),
        "rope_theta": _key("rotary_emb_base"),
    },
    "gptj": {"n_ctx": _key("n_positions"), "n_inner": _key("n_embd", 4)},
    "granitemoehybrid": {"mamba_expand": _mamba_expand},
    "helium": {"head_dim": _head_dim},
    "hy_v4": _LATENT | {"layer_types": _all_indexed, "num_local_experts": _key("n_routed_experts")},
    "inkling": {
        "moe_intermediate_size": lambda config: config[
            "intermediate_size"
            if config.get("dense_intermediate_size")
            else "moe_intermediate_size"
        ],
        "padded_vocab_size": _key("vocab_size"),
        "swa_v_head_dim": _key("swa_head_dim"),
        "v_head_dim": _key("head_dim"),
    },
    "jina_vlm": {
        "embedding_size": _key("vocab_size"),
        "block_config.attn_config.lnorm_config.eps": _key("block_config.lnorm_config.eps"),
    },
    "kimi_k3": {"num_key_value_heads": _key("num_attention_heads")},
    "kimi_vl": _LATENT,
    "lfm2": {
        "conv_dim": _key("hidden_size"),
        "num_heads": _key("num_attention_heads"),
    },
    "llama4": {"no_rope_layers": _llama4_rope_layers},
    "longcat_flash": _LATENT | {"num_hidden_layers": _key("num_layers")},
    "longcat_flash_ngram": _LATENT | {"num_hidden_layers": _key("num_layers")},
    "mamba": {"expand": lambda config: config["intermediate_size"] / config["hidden_size"]},
    "mamba2": {"expand": _mamba2_expand},
    "mellum": {"mlp_layer_types": _all("sparse")},
    "minicpm3": _LATENT | {"v_head_dim": _head_dim},
    "minimax_m3_vl": {"rotary_dim": _rotated_width},
    "mistral4": {"head_dim": _mla_head_dim, "num_key_value_heads": _key("num_attention_heads")},
    "nemotron_h": {"rms_norm_eps": _key("layer_norm_epsilon")},
    "recurrent_gemma": {
        "_block_types": _key("block_types"),
        "head_dim": _head_dim,
        "lru_width": _key("hidden_size"),
    },
    "stablelm": {
        "norm_eps": _key("layer_norm_eps"),
        "rope_pct": _key("partial_rotary_factor"),
    },
    "youtu_llm": _LATENT,
    "youtu_vl": _LATENT,
}
#: Required values for all modules.
_FOLLOWS_EVERYWHERE: Mapping[str, Follows] = {
    "head_dim": _head_dim,
    "num_experts": _key("n_routed_experts"),
    "qk_head_dim": lambda config: config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
}
#: Keys that only apply in the absence of one of these lists of layers, by module.
_WITHOUT_LISTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "afmoe": {"global_attn_every_n_layers": ("layer_types",)},
    "falcon_h1": {"mamba_expand": ("mamba_d_ssm",)},
    "exaone_moe": {
        "first_k_dense_replace": ("mlp_layer_types", "is_moe_layer"),
        "sliding_window_pattern": ("layer_types",),
    },
    "gemma3_text": {"_sliding_window_pattern": ("layer_types",)},
    "llama4_text": {"no_rope_layer_interval": ("no_rope_layers",)},
    "mimo_v2_flash": {"first_k_dense_replace": ("mlp_layer_types", "moe_layer_freq")},
}


class Asked(Mapping[str, Any]):
    """A config.json that records which of its keys were read."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.keys_asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def keys(module: str) -> set[str]:
    """Returns the keys whose value must follow from other keys."""
    return {*_FOLLOWS.get(module, ())}


def must_follow(config: Config, module: str, key: str) -> bool:
    """Whether a key contradicts the keys from which the module derives its value."""
    return key in _FOLLOWS.get(module, {}) and not is_implied(config, module, key)


def is_implied(config: Config, module: str, key: str) -> bool:
    """Whether a key that the module does not read follows from keys that it reads."""
    if key in ("sliding_window", "max_window_layers", "use_sliding_window"):
        return not has_windows(config, module)
    if key == "attention_chunk_size":
        return bool(config.get(key, 0) >= config.get("max_position_embeddings", math.inf))
    if key == "layer_types" and key not in _FOLLOWS.get(module, {}):
        served = {"full_attention"}
        if is_implied(config, module, "attention_chunk_size"):
            served.add("chunked_attention")
        return set(config[key]) <= served
    if any(config.get(name) for name in _WITHOUT_LISTS.get(module, {}).get(key, ())):
        return True
    follows = _follows(module, key)
    if follows is None:
        return False
    try:
        return bool(config[key] == follows(config))
    except (KeyError, TypeError):
        return False


def sources(config: Config, module: str, key: str) -> tuple[str, ...]:
    """Returns the keys that determine a key's required value; empty if none do."""
    asked = Asked(config)
    if (follows := _follows(module, key)) is not None:
        with suppress(KeyError, TypeError):
            follows(asked)
    return tuple(sorted(asked.keys_asked & config.keys()))


def _follows(module: str, key: str) -> Follows | None:
    return _FOLLOWS.get(module, {}).get(key) or _FOLLOWS_EVERYWHERE.get(key)


def has_windows(config: Config, module: str) -> bool:
    """Whether any layer's window is shorter than the context, as transformers reads the config."""
    window = config.get("sliding_window")
    longest = config.get("max_position_embeddings")
    if not window or window < 0 or (longest and window >= longest):
        return False
    types = config.get("layer_types")
    if types:
        return any("sliding" in kind for kind in types)
    if module not in _SWITCHED:
        return True
    first = config.get("max_window_layers")
    if module in ("qwen2", "qwen3") and first is not None:
        layers = config.get("num_hidden_layers", 0)
        return bool(config.get("use_sliding_window")) and first < layers
    return bool(config.get("use_sliding_window"))
