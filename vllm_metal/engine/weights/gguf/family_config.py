# SPDX-License-Identifier: Apache-2.0
"""Derives keys of config.json that only some families of GGUF models need.

Each function takes the file and the keys derived so far, and returns keys to add or replace;
LEFT_OUT drops a key.
"""

from typing import Any

import numpy as np

from .source import ConversionError, GGUFSource

Config = dict[str, Any]
LEFT_OUT: Any = object()  # instead of a value: config.json lacks the key

_GEMMA3_LOCAL_THETA = 10_000.0  # Gemma 3 report, section 2: 10k on local layers, 1M on global ones
_GEMMA3_PATTERN = 6  # same section: five local layers per global one
_GEMMA3_27B_LAYERS = 62  # only this size scales queries by hidden_size / heads, not by head_dim
_GEMMA2_27B_LAYERS = 46  # the same for Gemma 2
_MLA_YARN = 0.1  # llama.cpp stores a tenth of mscale_all_dim, the factor of YaRN's logarithm


def window_kinds(source: GGUFSource, period: int) -> list[str]:
    """Builds `layer_types` from the file's `attention.sliding_window_pattern`.

    The key has a flag per layer, or a period: every so many layers one has full attention.
    `period`: the period if the file lacks the key.
    """
    layers = source.require_arch("block_count")
    stated = source.arch("attention.sliding_window_pattern", period)
    if not isinstance(stated, int):
        flags = [bool(flag) for flag in stated[:layers]]
    else:
        flags = [(layer + 1) % stated != 0 for layer in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def gemma2(source: GGUFSource, config: Config) -> Config:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    scale = config["hidden_size"] // heads if layers == _GEMMA2_27B_LAYERS else config["head_dim"]
    return {"query_pre_attn_scalar": scale, "layer_types": window_kinds(source, 2)}


def gemma3(source: GGUFSource, config: Config) -> Config:
    layers = source.require_arch("block_count")
    kinds = window_kinds(source, _GEMMA3_PATTERN)
    # mlx-lm takes a period, so the layer types must have one.
    period = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
    if [kind == "full_attention" for kind in kinds] != [
        (i + 1) % period == 0 for i in range(layers)
    ]:
        raise ConversionError(
            f"{source.path}: gemma3.attention.sliding_window_pattern has no fixed period, "
            "which mlx-lm's gemma3 needs"
        )
    heads = config["num_attention_heads"]
    scale = config["hidden_size"] // heads if layers == _GEMMA3_27B_LAYERS else config["head_dim"]
    return {
        "query_pre_attn_scalar": scale,
        "sliding_window_pattern": period,
        "layer_types": kinds,
        "rope_local_base_freq": source.arch("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
    }


def gemma4(source: GGUFSource, config: Config) -> Config:
    kinds = window_kinds(source, _GEMMA3_PATTERN)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    by_layer = source.require_arch("attention.head_count_kv")
    if not isinstance(by_layer, list):
        by_layer = [by_layer] * len(kinds)
    windowed = [layer for layer, kind in enumerate(kinds) if kind != "full_attention"]
    widths = source.require_arch("feed_forward_length")
    shared = source.arch("attention.shared_kv_layers", 0)
    own = [layer for layer in full if layer < len(kinds) - shared]
    factors = source.tensors["rope_freqs.weight"].data.view(np.float32)
    found = {
        "layer_types": kinds,
        "head_dim": source.require_arch("attention.key_length_swa"),
        "global_head_dim": source.require_arch("attention.key_length"),
        "num_key_value_heads": by_layer[windowed[0] if windowed else 0],
        "num_global_key_value_heads": by_layer[full[0]] if full else None,
        "attention_k_eq_v": any(
            f"blk.{layer}.attn_v.weight" not in source.tensors for layer in own
        ),
        "num_kv_shared_layers": shared,
        "sliding_window": source.require_arch("attention.sliding_window"),
        "final_logit_softcapping": source.arch("final_logit_softcapping"),
        "hidden_size_per_layer_input": source.arch("embedding_length_per_layer_input", 0),
        "intermediate_size": min(widths) if isinstance(widths, list) else widths,
        "use_double_wide_mlp": isinstance(widths, list) and min(widths) != max(widths),
        "enable_moe_block": bool(source.arch("expert_count", 0)),
        "rope_theta": LEFT_OUT,
        "partial_rotary_factor": LEFT_OUT,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": config["rope_theta"],
                # Rotated pairs have a divisor of 1.
                "partial_rotary_factor": float((factors == 1).mean()),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": source.arch("rope.freq_base_swa", _GEMMA3_LOCAL_THETA),
            },
        },
    }
    if (table := source.tensors.get("per_layer_token_embd.weight")) is not None:
        found["vocab_size_per_layer_input"] = table.shape[0]
    if found["enable_moe_block"]:
        found |= {
            "num_experts": source.require_arch("expert_count"),
            "top_k_experts": source.require_arch("expert_used_count"),
            "moe_intermediate_size": source.require_arch("expert_feed_forward_length"),
        }
    return found


def gpt_oss(source: GGUFSource, config: Config) -> Config:
    found: Config = {"layer_types": window_kinds(source, 2)}
    if scaling := config.get("rope_scaling"):
        # gpt-oss' YaRN does not truncate, and GGUF has no key for it.
        found["rope_scaling"] = {**_YARN_DEFAULTS, **scaling, "truncate": False}
    return found


_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}


def ministral3(source: GGUFSource, config: Config) -> Config:
    rope = {
        **config.get("rope_scaling", {"rope_type": "default"}),
        "rope_theta": config["rope_theta"],
        "mscale": 1.0,
        "mscale_all_dim": source.arch("rope.scaling.yarn_log_multiplier", 1.0),
        "llama_4_scaling_beta": source.require_arch("attention.temperature_scale"),
    }
    return {
        "rope_parameters": rope,
        "rope_scaling": LEFT_OUT,
        "rope_theta": LEFT_OUT,
        "attention_bias": LEFT_OUT,
    }


def deepseek_experts(source: GGUFSource, config: Config) -> Config:
    return {
        "moe_intermediate_size": source.require_arch("expert_feed_forward_length"),
        "n_routed_experts": source.require_arch("expert_count"),
        "num_experts_per_tok": source.require_arch("expert_used_count"),
        "n_shared_experts": source.arch("expert_shared_count", 0),
        "first_k_dense_replace": source.arch("leading_dense_block_count", 0),
        "n_group": source.arch("expert_group_count", 1),
        "topk_group": source.arch("expert_group_used_count", 1),
        "routed_scaling_factor": source.arch("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(source.arch("expert_weights_norm", False)),
    }


def glm4_moe(source: GGUFSource, config: Config) -> Config:
    return {
        **deepseek_experts(source, config),
        "rope_scaling": config.get("rope_scaling"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors,
    }


def deepseek(source: GGUFSource, config: Config) -> Config:
    rotary = source.require_arch("rope.dimension_count")
    keys = source.arch("attention.key_length_mla", source.arch("attention.key_length"))
    values = source.arch("attention.value_length_mla", source.arch("attention.value_length"))
    found = {
        **deepseek_experts(source, config),
        "head_dim": LEFT_OUT,
        "partial_rotary_factor": LEFT_OUT,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": source.arch("attention.q_lora_rank"),
        "kv_lora_rank": source.require_arch("attention.kv_lora_rank"),
        "qk_nope_head_dim": keys - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": values,
        "attention_bias": False,
    }
    if "rope_scaling" in config:
        # mscale equals mscale_all_dim in all releases.
        mscale = source.arch("rope.scaling.yarn_log_multiplier", _MLA_YARN) / _MLA_YARN
        found["rope_scaling"] = {
            **_YARN_DEFAULTS,
            **config["rope_scaling"],
            "mscale": mscale,
            "mscale_all_dim": mscale,
        }
    return found


def deepseek2(source: GGUFSource, config: Config) -> Config:
    found = deepseek(source, config)
    grouped = found["n_group"] > 1
    return found | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def phi3(source: GGUFSource, config: Config) -> Config:
    found: Config = {"sliding_window": source.arch("attention.sliding_window") or None}
    if original := source.arch("rope.scaling.original_context_length"):
        found["original_max_position_embeddings"] = original
    factors = {
        f"{kind}_factor": source.tensors[name].data.view(np.float32).ravel().tolist()
        for kind in ("long", "short")
        if (name := f"rope_factors_{kind}.weight") in source.tensors
    }
    if factors:
        found["rope_scaling"] = {"type": "longrope", "rope_type": "longrope", **factors}
    return found


def every_fourth_sees_all(source: GGUFSource, config: Config) -> Config:
    """Builds `layer_types` by `window_kinds`, by default with full attention in every 4th layer."""
    return {"layer_types": window_kinds(source, 4)}


def cohere(source: GGUFSource, config: Config) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors}


def exaone4(source: GGUFSource, config: Config) -> Config:
    window = source.arch("attention.sliding_window")
    if not window:
        return {"sliding_window": None, "rope_scaling": config.get("rope_scaling")}
    kinds = window_kinds(source, 4)
    return {
        "sliding_window": window,
        "sliding_window_pattern": "LLLG",
        "layer_types": kinds,
        "rope_scaling": config.get("rope_scaling"),
    }


def minimax(source: GGUFSource, config: Config) -> Config:
    return {
        "rotary_dim": source.require_arch("rope.dimension_count"),
        "partial_rotary_factor": LEFT_OUT,
    }


def stablelm(source: GGUFSource, config: Config) -> Config:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in source.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in source.tensors,
        "use_parallel_residual": source.arch("use_parallel_residual", False),
    }


def seed_oss(source: GGUFSource, config: Config) -> Config:
    return {"attention_out_bias": "blk.0.attn_output.bias" in source.tensors}


def ernie(source: GGUFSource, config: Config) -> Config:
    return {"use_bias": "blk.0.ffn_down.bias" in source.tensors}


def ernie_moe(source: GGUFSource, config: Config) -> Config:
    last = config["num_hidden_layers"] - 1
    return {**ernie(source, config), "moe_layer_end_index": last}


def exaone_moe(source: GGUFSource, config: Config) -> Config:
    experts = deepseek_experts(source, config)
    dense = experts.pop("first_k_dense_replace")
    layers = config["num_hidden_layers"]
    return {
        "num_experts": experts.pop("n_routed_experts"),
        "num_shared_experts": experts.pop("n_shared_experts"),
        **experts,
        "layer_types": window_kinds(source, 4)[:layers],
        "is_moe_layer": [layer >= dense for layer in range(layers)],
    }
