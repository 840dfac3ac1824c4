# SPDX-License-Identifier: Apache-2.0
"""Small models written by transformers' own classes, of families that mlx-lm also has.

Their shapes are unusual where the family allows it: three query heads per K/V head, heads wider
than hidden size / heads, keys and values of different widths, multipliers other than 1, biases,
layers in no repeating pattern. Weights are large enough that texts vary.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from own_configs import own_class
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.hy_v4 import modeling_hy_v4

VOCAB = 99
_LAYERS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_STATES = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
_WINDOW = {"sliding_window": 7, "layer_types": _LAYERS}
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 16}
_EXPERTS = {
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
_ROUTED = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
_LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
}
#: With few heads, many positions have a score of zero in all of them, and torch's `topk` does not
#: specify which of equal scores it selects.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": _STATES,
}
#: Keys that some classes read without declaring them.
_UNDECLARED = ("global_head_dim", "head_dim", "num_hidden_layers")
_GPT = {"vocab_size": VOCAB, "n_embd": 72, "n_layer": 3, "n_head": 6, "n_positions": 512}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}


def _rope(theta: float = 10000.0, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **changes}}


def _ropes(**changes: Any) -> dict[str, Any]:
    """Returns RoPE parameters of layers with a window, and of the others."""
    both = {"sliding_attention": {"rope_theta": 100.0}, "full_attention": {"rope_theta": 5000.0}}
    return {
        "rope_parameters": {
            kind: {"rope_type": "default", **rope, **changes.get(kind, {})}
            for kind, rope in both.items()
        }
    }


@dataclass(frozen=True)
class Published:
    """A small model of a transformers family."""

    model_type: str  # of the text model's configuration
    config: dict[str, Any]  # differences from the common part
    common: bool = True  # whether the common part is included


_HALF = _rope(partial_rotary_factor=0.5) | {"partial_rotary_factor": 0.5}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

FAMILIES: dict[str, Published] = {
    name: Published(name.partition(",")[0], config)
    for name, config in {
        "llama": _HEAD | {"attention_bias": True, "mlp_bias": True} | _rope(700.0),
        "llama, llama3": _HEAD
        | _rope(
            700.0,
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        "mistral": _HEAD | {"sliding_window": 9},
        "ministral3": _HEAD
        | _rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
        "qwen2": {"use_sliding_window": False},
        "qwen3": _HEAD,
        "gemma": _HEAD | {"tie_word_embeddings": True},
        "gemma2": _HEAD
        | _WINDOW
        | {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
        "gemma3_text": _HEAD | _WINDOW | _ropes() | {"query_pre_attn_scalar": 20},
        "glm": _HEAD | _HALF,
        "glm4": _HEAD | _HALF,
        "starcoder2": {"use_bias": True, "sliding_window": 9},
        "olmo": {"clip_qkv": 1.5},
        "olmo2": {},
        "olmo3": _WINDOW,
        "cohere": {"use_qk_norm": True, "logit_scale": 0.3, "tie_word_embeddings": True},
        "cohere2": _WINDOW | {"logit_scale": 0.3, "tie_word_embeddings": True},
        "cohere2_moe": _WINDOW
        | _HEAD
        | _EXPERTS
        | {
            "logit_scale": 0.3,
            "tie_word_embeddings": True,
            "num_shared_experts": 2,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 56,
            "attention_bias": True,
        },
        # Windows by periods, and weights of experts by a softmax.
        "cohere2_moe, periods": _HEAD
        | _EXPERTS
        | {
            "tie_word_embeddings": True,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
            "prefix_dense_sliding_window_pattern": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "num_shared_experts": 1,
            "rms_norm_eps": 1e-3,
        },
        "granite": _MULTIPLIERS | {"attention_bias": True, "mlp_bias": True},
        "smollm3": {"no_rope_layers": [1, 0, 0, 1]},
        "ernie4_5": _HEAD | {"use_bias": True},
        "helium": {"head_dim": 12},
        "nemotron": _HEAD | _HALF | {"attention_bias": True, "mlp_bias": True},
        "seed_oss": _HEAD | {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
        "apertus": _rope(
            700.0,
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        "stablelm": {"use_qkv_bias": True, "qk_layernorm": True} | _HALF,
        "phi": _HALF | {"num_key_value_heads": 6},
        "phi3": _HALF | {"num_key_value_heads": 2, "sliding_window": 9},
        "hunyuan_v1_dense": _HEAD,
        "bitnet": {},
        "exaone4": _WINDOW,
        "nanochat": {"final_logit_softcapping": 15.0, "rms_norm_eps": 1e-5},
        "gpt_neox": _HALF | {"intermediate_size": 288, "use_parallel_residual": True},
        "gpt_neox, one after another": _HALF
        | {"intermediate_size": 288, "use_parallel_residual": False},
        "lfm2": {
            "layer_types": ["conv", "full_attention", "full_attention", "conv"],
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
        "mixtral": _EXPERTS | {"head_dim": 12},
        "qwen2_moe": _EXPERTS
        | {
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": False,
        },
        "qwen3_moe": _EXPERTS
        | _HEAD
        | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        "olmoe": _EXPERTS | {"norm_topk_prob": True},
        "granitemoe": _EXPERTS | _MULTIPLIERS,
        "phimoe": _EXPERTS
        | {"attention_bias": True, "lm_head_bias": True}
        | _rope(
            rope_type="longrope",
            original_max_position_embeddings=512,
            short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            long_factor=[2.0] * 6,
            short_mscale=1.1,
            long_mscale=1.2,
        ),
        "gpt_oss": _EXPERTS
        | _HEAD
        | _WINDOW
        | _rope(
            rope_type="yarn",
            factor=4.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
        "glm4_moe": _ROUTED | _HEAD | _HALF | {"use_qk_norm": True, "attention_bias": True},
        "dots1": _ROUTED | _HEAD,
        "solar_open": _ROUTED | _HEAD,
        "ernie4_5_moe": {
            "use_bias": False,
            "moe_intermediate_size": 40,
            "moe_k": 2,
            "moe_num_experts": 5,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
        },
        "exaone_moe": _EXPERTS
        | _WINDOW
        | {
            "num_shared_experts": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 1,
        },
        "afmoe": _EXPERTS
        | _HEAD
        | _WINDOW
        | {
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
        "laguna": _EXPERTS
        | _HEAD
        | _WINDOW
        | _ropes(full_attention={"partial_rotary_factor": 0.5})
        | {"shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.7},
        "mellum": _EXPERTS | _HEAD | _WINDOW | _ropes(),
        "mimo_v2_flash": _ROUTED
        | _HEAD
        | _WINDOW
        | _ropes(
            full_attention={"partial_rotary_factor": 0.5},
            sliding_attention={"partial_rotary_factor": 0.5},
        )
        | {"v_head_dim": 12, "num_key_value_heads": 1},
        "minimax_m2": _EXPERTS | _HEAD | _HALF,
        "llama4_text": _EXPERTS
        | _HEAD
        | {
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 512,
            "layer_types": [
                "chunked_attention",
                "full_attention",
                "chunked_attention",
                "full_attention",
            ],
            "no_rope_layers": [1, 0, 1, 0],
            "floor_scale": 5,
            "attn_scale": 0.7,
        },
        "deepseek_v2": _LATENT
        | _ROUTED
        | _rope(**_YARN)
        | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
        "deepseek_v3": _LATENT | _ROUTED | {"attention_bias": True},
        "deepseek_v3, yarn": _LATENT | _ROUTED | _rope(**_YARN),
        "glm4_moe_lite": _LATENT | _ROUTED,
        "mistral4": _LATENT
        | _ROUTED
        | _rope(
            100.0,
            **_YARN | {"original_max_position_embeddings": 16},
            llama_4_scaling_beta=0.1,
            partial_rotary_factor=8 / 24,
        )
        | {"head_dim": 24},
        "deepseek_v32": _LATENT | _ROUTED | _INDEXER,
        "deepseek_v32, yarn": _LATENT | _ROUTED | _INDEXER | _rope(**_YARN),
        # Windows alone; groups of 4 and an indexer; groups of 128. Experts by a table of tokens.
        "deepseek_v4": {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "moe_intermediate_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "q_lora_rank": 48,
            "num_experts_per_tok": 2,
            "n_routed_experts": 5,
            "routed_scaling_factor": 1.7,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "hc_mult": 3,
            "hc_eps": 1e-3,
            "hc_sinkhorn_iters": 2,
            "swiglu_limit": 1.2,
            "sliding_window": 12,
            "o_groups": 3,
            "o_lora_rank": 10,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 8,
            "partial_rotary_factor": 0.25,
            "rope_theta": 700.0,
            "compress_rope_theta": 900.0,
            "rms_norm_eps": 1e-3,
        },
        "glm_moe_dsa": _LATENT
        | _ROUTED
        | _INDEXER
        | {"indexer_types": ["full", "shared", "full", "shared"]},
        "hy_v4": _LATENT
        | _ROUTED
        | _INDEXER
        | {
            "attention_bias": True,
            "hc_eps": 0.01,
            "hc_magnitude": 1.7,
            "hc_mult": 3,
            "indexer_types": ["full", "shared", "full", "shared"],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rms_norm_eps": 1e-3,
            "swiglu_limit": 1.2,
        },
        "minicpm3": _LATENT
        | _rope(
            rope_type="longrope",
            original_max_position_embeddings=512,
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[2.0, 2.1, 2.5, 3.0],
            factor=1.0,
        )
        | {
            "scale_emb": 3.0,
            "scale_depth": 1.7,
            "dim_model_base": 48,
            "num_hidden_layers": 3,
            "v_head_dim": 12,
        },
        "kimi_linear": _LATENT
        | _ROUTED
        | {
            "num_experts": 6,
            "num_experts_per_token": 3,
            "num_shared_experts": 1,
            "num_expert_group": 3,
            "topk_group": 2,
            "q_lora_rank": None,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": _STATES,
        },
        "longcat_flash": _LATENT
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,  # two per block
            "ffn_hidden_size": 88,
            "expert_ffn_hidden_size": 40,
            "moe_topk": 3,
            "n_routed_experts": 5,
            "zero_expert_num": 2,
            "routed_scaling_factor": 1.7,
        },
        "qwen3_next": _DELTA
        | _EXPERTS
        | _HEAD
        | _HALF
        | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        "qwen3_5_text": _DELTA | _HEAD | _HALF,
        "qwen3_5_moe_text": _DELTA
        | _EXPERTS
        | _HEAD
        | _HALF
        | {"shared_expert_intermediate_size": 40},
        # transformers writes the three parts of a convolution as if they had the same width.
        "olmo_hybrid": _DELTA
        | {"linear_num_key_heads": 6, "linear_value_head_dim": 8, "num_key_value_heads": 2},
        "falcon_h1": _HEAD
        | {
            "mamba_d_ssm": 48,
            "mamba_n_heads": 6,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "lm_head_multiplier": 0.6,
            "embedding_multiplier": 1.7,
            "mlp_multipliers": [1.3, 0.7],
            "key_multiplier": 0.4,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 1.2, 0.6, 0.8, 1.3],
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.6,
        },
        "jamba": {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "expert_layer_period": 3,
            "expert_layer_offset": 1,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 6,
            "mamba_proj_bias": True,
        },
        "mamba2": {
            "hidden_size": 48,
            "num_heads": 12,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 3,
            "expand": 2,
            "chunk_size": 8,
            "use_bias": True,
            "intermediate_size": 96,
            "layer_norm_epsilon": 0.01,
        },
        "mamba": {"hidden_size": 48, "state_size": 8, "time_step_rank": 5, "use_bias": True},
        "falcon_mamba": {"hidden_size": 48, "state_size": 8, "time_step_rank": 5},
        "granitemoehybrid": _EXPERTS
        | _MULTIPLIERS
        | {
            "shared_intermediate_size": 56,
            "layer_types": ["mamba", "attention", "attention", "mamba"],
            "mamba_n_heads": 6,
            "mamba_d_head": 24,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "position_embedding_type": "rope",
        },
        "nemotron_h": _ROUTED
        | _HEAD
        | {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "moe_shared_expert_intermediate_size": 56,
            # transformers' class bounds steps by this from below, in no file's words: published
            # ones say time_step_limit [0, inf], which mlx-lm's module computes and vLLM's kernels
            # do, and this key is where the drawing of dt_bias began. We compute as vLLM does.
            "time_step_min": 1e-6,
            "mlp_bias": True,
        },
        "lfm2_moe": _EXPERTS
        | {
            "layer_types": ["conv", "full_attention", "full_attention", "conv"],
            "conv_bias": True,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.7,
            "tie_word_embeddings": True,
        },
        "recurrent_gemma": {
            "num_key_value_heads": 1,
            "block_types": ["recurrent", "attention", "attention", "recurrent"],
            "attention_window_size": 7,
            "lru_width": 72,
            "intermediate_size": 176,
            "logits_soft_cap": 5.0,
            "rms_norm_eps": 0.01,
        },
        "minimax": _EXPERTS
        | _HEAD
        | {
            "block_size": 8,
            "layer_types": _STATES,
            "linear_attn_alpha_factor": 1.2,
        },
        "gemma3n_text": _HEAD
        | _ropes()
        | {
            "num_hidden_layers": 5,
            "tie_word_embeddings": True,
            "num_kv_shared_layers": 2,
            "layer_types": [
                "sliding_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "sliding_window": 7,
            "intermediate_size": [88] * 5,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 10,
            "altup_num_inputs": 3,
            "laurel_rank": 8,
            "final_logit_softcapping": 5.0,
        },
        "gemma4_text": _HEAD
        | {
            "num_hidden_layers": 6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
            ],
            "sliding_window": 7,
            "global_head_dim": 24,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 10,
            "final_logit_softcapping": 5.0,
        },
    }.items()
}
_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 72,
}
FAMILIES |= {
    # Positions in layers with windows only, as published, with frequencies of three sizes.
    "cohere_compass": Published(
        "cohere_compass",
        {
            "text_config": {**_COMMON, "num_attention_heads": 3, "num_key_value_heads": 1}
            | _WINDOW
            | {
                "logit_scale": 0.3,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "full_attention": None,
                    "sliding_attention": {
                        "rope_type": "default",
                        "rope_theta": 700.0,
                        "mrope_section": [6, 2, 4],
                        "mrope_interleaved": True,
                    },
                },
            },
            "vision_config": _TOWER | {"deepstack_visual_indexes": [0]},
            "tie_word_embeddings": True,
        },
        common=False,
    ),
    # Experts of images beside those of text, and a layer without any.
    "ernie4_5_vl_moe": Published(
        "ernie4_5_vl_moe",
        {
            "text_config": _COMMON
            | _rope(700.0, mrope_section=[2, 2, 2])
            | {
                "moe_intermediate_size": [40, 24],
                "moe_k": 2,
                "moe_num_experts": 5,
                "moe_num_shared_experts": 1,
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
            },
            "tie_word_embeddings": False,
        },
        common=False,
    ),
    # States beside latents without RoPE, of which pooled keys choose groups.
    "glm5_next": Published(
        "glm5_next",
        {
            "text_config": _COMMON
            | _LATENT
            | _ROUTED
            | {
                "num_hidden_layers": 5,
                "qk_rope_head_dim": 0,
                "layer_types": [
                    *("linear_attention", "indexed_attention", "indexed_attention"),
                    *("linear_attention", "indexed_attention"),
                ],
                "indexer_types": ["full", "full", "shared", "full", "full"],
                "mlp_layer_types": ["dense", *["sparse"] * 4],
                "index_n_heads": 16,
                "index_head_dim": 12,
                "index_topk": 12,
                "index_kpool": 3,
                "linear_head_dim": 8,
                "linear_num_heads": 4,
                "linear_lower_bound": -3.0,
                "hc_mult": 3,
                "hc_eps": 0.01,
                "hc_sinkhorn_iters": 2,
                "rms_norm_eps": 1e-3,
                "swiglu_limit": 1.2,
            },
            "vision_config": _TOWER | {"projection_intermediate_size": 16},
            "tie_word_embeddings": False,
        },
        common=False,
    ),
    "glm_ocr": Published(
        "glm_ocr",
        {
            "text_config": _COMMON
            | _HEAD
            | _rope(700.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 2]),
            "vision_config": _TOWER,
            "tie_word_embeddings": False,
        },
        common=False,
    ),
    "minimax_m3_vl": Published(
        "minimax_m3_vl",
        {
            "text_config": _COMMON
            | _HEAD
            | _rope(700.0, partial_rotary_factor=0.5)
            | {
                "rotary_dim": 8,
                "intermediate_size": 40,
                "dense_intermediate_size": 88,
                "shared_intermediate_size": 48,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "routed_scaling_factor": 1.7,
                "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
                "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
                "index_n_heads": 2,
                "index_head_dim": 24,
                "index_block_size": 8,
                "index_topk_blocks": 3,
                "index_local_blocks": 1,
            },
            "vision_config": {
                "hidden_size": 16,
                "image_size": 28,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
            },
            "projector_hidden_size": 16,
            "tie_word_embeddings": False,
        },
        common=False,
    ),
    # Layers 0 and 2 only attend to images, so text bypasses them.
    "mllama": Published(
        "mllama",
        {
            "text_config": _COMMON
            | {"cross_attention_layers": [0, 2]}
            | _rope(
                700.0,
                rope_type="llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            "vision_config": {
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 2,
                "intermediate_size": 16,
                "image_size": 28,
                "vision_output_dim": 32,
                "intermediate_layers_indices": [0],
            },
        },
        common=False,
    ),
    # Layers of two kinds, tables of n-grams in two of them, and streams of hyper-connections.
    "qwen4_exp": Published(
        "qwen4_exp",
        {
            "text_config": {k: n for k, n in _COMMON.items() if k != "intermediate_size"}
            | _HEAD
            | _rope(700.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 2])
            | _DELTA
            | {
                "num_hidden_layers": 5,
                "layer_types": [
                    *("linear_attention", "full_attention", "full_attention"),
                    *("linear_attention", "full_attention"),
                ],
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "shared_expert_intermediate_size": 48,
                "hc_count": 3,
                "hc_lowrank": 20,
                "output_gate_type": "sigmoid",
                "ple_layer_ids": [1, 4],
                "ple_embed_dim": 24,
                "ple_conv_kernel_size": 3,
                "ngram_size": 3,
                "heads_per_ngram": 3,
                "ngram_vocab_size_base": 50,
                "make_ngram_vocab_size_divisible_by": 8,
                "split_ngram_parts": 4,
                "indexer_n_heads": 16,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 24,
                "indexer_budget": 24,
                "indexer_compress_ratio": 4,
            },
            "vision_config": _TOWER,
            "tie_word_embeddings": False,
        },
        common=False,
    ),
    "gpt2": Published("gpt2", _GPT | {"n_inner": 288}, common=False),
    "gpt_bigcode": Published("gpt_bigcode", _GPT | {"n_inner": 288}, common=False),
    "gptj": Published("gptj", _GPT | {"rotary_dim": 6}, common=False),
    "dbrx": Published(
        "dbrx",
        {
            "vocab_size": VOCAB,
            "d_model": 72,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 700.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
            "ffn_config": {
                "hidden_size": 72,
                "ffn_hidden_size": 40,
                "moe_num_experts": 5,
                "moe_top_k": 2,
            },
        },
        common=False,
    ),
}


def make(family: Published, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Makes transformers' float32 model with weights large enough that its texts vary.

    Args:
        family: the family.
        seed: seed of the weights.
        changes: changes of the configuration.
    """
    config = configuration(family, **changes)
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, attn_implementation="eager").float().eval()
    draw(model, torch.Generator().manual_seed(seed))
    return model


def auto_class(config: Any) -> Any:
    """Returns the auto class for a configuration's whole model."""
    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if has_images else AutoModelForCausalLM


def configuration(family: Published, **changes: Any) -> Any:
    """Returns transformers' configuration of the small model."""
    if family.model_type == "hy_v4":
        _rotate_neighbors()
    content = (_COMMON if family.common else {}) | family.config | changes
    of_family = own_class(family.model_type)
    return of_family(**_declared(of_family, content))


def _rotate_neighbors() -> None:
    """Makes transformers' Hy4 rotate the pairs of elements that its weights were trained with.

    Its class pairs elements of a head's halves, but takes the published weights unchanged. Hy4's
    authors pair neighbors in vLLM (`HYV4MLAAttention`, `is_neox_style=False`), as llama.cpp does.
    """
    modeling_hy_v4.apply_rotary_pos_emb = modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave


def _declared(of_family: Any, content: dict[str, Any]) -> dict[str, Any]:
    """Returns only the keys that the family's configuration declares."""
    names = of_family.attribute_map
    own = {*inspect.signature(of_family).parameters, *names, *names.values()}
    own |= {"partial_rotary_factor", *_UNDECLARED}  # all take the first one, in another place
    return {key: value for key, value in content.items() if key in own}


def draw(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draws parameters; those that a recurrence's stability depends on vary only a little."""
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        last = name.rpartition(".")[2]
        of_norm = parameter.ndim == 1 and last == "weight"
        if last in ("A_log", "D", "dt_bias") or of_norm:
            parameter.data = parameter.data + 0.2 * drawn
        elif name.endswith(("hc.scale", "hc_scale")):  # otherwise streams have nearly equal weights
            parameter.data = 1.0 + 0.2 * drawn
        elif parameter.ndim >= 2:
            inputs = parameter.shape[-1] if parameter.shape[-2] > 1 else parameter[0].numel()
            of_tokens = "embed" in name or ".wte" in name
            parameter.data = drawn * (0.5 if of_tokens else 1.6 / inputs**0.5)
        else:
            parameter.data = 0.2 * drawn
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "expert_bias" in name:
            buffer.data = 0.2 * torch.randn(buffer.shape, generator=generator)
        elif name.endswith(".tid2eid"):  # experts of each token
            experts = model.config.n_routed_experts
            drawn = torch.rand((len(buffer), experts), generator=generator).argsort(-1)
            buffer.data = drawn[:, : buffer.shape[1]]


def write(model: Any, folder: Path) -> str:
    """Saves the model as transformers does."""
    model.save_pretrained(folder)
    return str(folder)


def log_probabilities(model: Any, prompts: list[list[int]]) -> list[np.ndarray]:
    """Returns [length, V] float32 per prompt, by transformers' forward of the whole text."""
    found = []
    with torch.no_grad():
        for prompt in prompts:
            logits = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
            found.append(torch.log_softmax(logits, -1).numpy())
    return found


#: Models of transformers that the engine rejects, with words of the reason.
REFUSED: dict[str, tuple[Published, str]] = {
    "minimax": (FAMILIES.pop("minimax"), "linear_attn_alpha_factor"),
}
