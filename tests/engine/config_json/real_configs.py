# SPDX-License-Identifier: Apache-2.0
"""Keys of published models' config.json files, by model.

Values are given where they matter. Shapes that any file of the family has are left out if nothing
depends on them. 1 stands for any number.
"""

import json
from pathlib import Path
from typing import Any

Config = dict[str, Any]


def _any(words: str) -> Config:
    """Returns keys with arbitrary values."""
    return dict.fromkeys(words.split(), 1)


#: Keys of nearly every file.
_EVERY: Config = _any(
    "hidden_size intermediate_size num_attention_heads num_hidden_layers num_key_value_heads "
    "vocab_size max_position_embeddings bos_token_id eos_token_id initializer_range "
    "attention_dropout"
) | {"architectures": ["Any"], "torch_dtype": "bfloat16", "transformers_version": "4.50.0"}
_RMS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "use_cache": True, "rope_theta": 10000.0}
_LLAMA = _EVERY | _RMS | {"rope_scaling": None, "tie_word_embeddings": False}
_BIASES = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
_QWEN = _LLAMA | {
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_hidden_layers": 28,
    "sliding_window": 32768,
    "use_sliding_window": False,
}
_MOE = _any("moe_intermediate_size num_experts num_experts_per_tok router_aux_loss_coef") | {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "output_router_logits": False,
}
_DEEPSEEK = (
    _LLAMA
    | _any(
        "aux_loss_alpha ep_size first_k_dense_replace kv_lora_rank moe_intermediate_size "
        "moe_layer_freq n_group n_routed_experts n_shared_experts num_experts_per_tok "
        "num_nextn_predict_layers pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim "
        "routed_scaling_factor topk_group v_head_dim"
    )
    | {
        "attention_bias": False,
        "auto_map": {},
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    }
)
_GLM = (
    _LLAMA
    | _any(
        "head_dim first_k_dense_replace moe_intermediate_size n_group n_routed_experts "
        "n_shared_experts num_experts_per_tok num_nextn_predict_layers pad_token_id "
        "partial_rotary_factor routed_scaling_factor topk_group"
    )
    | {"attention_bias": True, "norm_topk_prob": True, "use_qk_norm": True}
)
_LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_FOUR = ["sliding_attention"] * 3 + ["full_attention"]
_FOUR_BITS = {"group_size": 64, "bits": 4}
_MIXED = {"group_size": 64, "bits": 4, "lm_head": {"group_size": 64, "bits": 6}}
_QUANTIZED = {"quantization": _MIXED, "quantization_config": _MIXED}
_VISION = {"vision_config": {"hidden_size": 1}}
_QWEN_VISION = _any("image_token_id video_token_id vision_end_token_id vision_start_token_id")

CONFIGS: dict[str, Config] = {
    name: {"model_type": model_type} | config
    for name, (model_type, config) in {
        "meta-llama/Llama-2-7b": ("llama", _LLAMA | {"pretraining_tp": 1}),
        "meta-llama/Llama-3.1-8B": ("llama", _LLAMA | _BIASES | {"rope_scaling": _LLAMA3}),
        "meta-llama/Llama-3.2-1B": (
            "llama",
            _LLAMA | _BIASES | {"head_dim": 64, "rope_scaling": _LLAMA3},
        ),
        "mlx-community/Llama-3.2-3B-Instruct-4bit": (
            "llama",
            _LLAMA
            | _BIASES
            | {"quantization": _FOUR_BITS, "quantization_config": _FOUR_BITS, "pad_token_id": 1},
        ),
        "HuggingFaceTB/SmolLM2-1.7B": (
            "llama",
            _LLAMA
            | _BIASES
            | {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {}},
        ),
        "TinyLlama/TinyLlama-1.1B": ("llama", _LLAMA | {"pretraining_tp": 1}),
        "mistralai/Mistral-7B-Instruct-v0.3": (
            "mistral",
            _LLAMA | {"sliding_window": None, "head_dim": 128},
        ),
        "mistralai/Mixtral-8x7B-v0.1": (
            "mixtral",
            _LLAMA
            | _any("num_experts_per_tok num_local_experts router_aux_loss_coef")
            | {"output_router_logits": False, "sliding_window": None},
        ),
        "mistralai/Devstral-2-123B-Instruct": (
            "ministral3",
            _EVERY
            | {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "use_cache": True}
            | {
                "sliding_window": None,
                "rope_parameters": {
                    "beta_fast": 4.0,
                    "beta_slow": 1.0,
                    "factor": 64.0,
                    "llama_4_scaling_beta": 0.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.0,
                    "original_max_position_embeddings": 4096,
                    "rope_theta": 1e6,
                    "rope_type": "yarn",
                    "type": "yarn",
                },
            },
        ),
        "Qwen/Qwen2-7B": ("qwen2", _QWEN),
        "Qwen/Qwen2.5-7B-Instruct": ("qwen2", _QWEN | {"use_mrope": False}),
        "Qwen/Qwen1.5-MoE-A2.7B": (
            "qwen2_moe",
            _QWEN
            | _MOE
            | {"norm_topk_prob": False, "shared_expert_intermediate_size": 1, "qkv_bias": True},
        ),
        "Qwen/Qwen3-8B": (
            "qwen3",
            _QWEN | {"attention_bias": False, "head_dim": 128, "sliding_window": None},
        ),
        "mlx-community/Qwen3-8B-mixed": (
            "qwen3",
            _QWEN | _QUANTIZED | {"attention_bias": False, "head_dim": 128, "sliding_window": None},
        ),
        "Qwen/Qwen3-30B-A3B": (
            "qwen3_moe",
            _QWEN
            | _MOE
            | {"attention_bias": False, "head_dim": 128, "sliding_window": None}
            | {"quantization": _MIXED},
        ),
        "Qwen/Qwen3-Next-80B-A3B": (
            "qwen3_next",
            _LLAMA
            | _MOE
            | _any(
                "full_attention_interval head_dim linear_conv_kernel_dim linear_key_head_dim "
                "linear_num_key_heads linear_num_value_heads linear_value_head_dim "
                "partial_rotary_factor shared_expert_intermediate_size"
            )
            | {"attention_bias": False, "use_sliding_window": False},
        ),
        "Qwen/Qwen3.5-9B": (
            "qwen3_5",
            {"architectures": ["Any"], "tie_word_embeddings": False}
            | _VISION
            | _QWEN_VISION
            | {
                "text_config": _EVERY
                | _any(
                    "full_attention_interval head_dim linear_conv_kernel_dim linear_key_head_dim "
                    "linear_num_key_heads linear_num_value_heads linear_value_head_dim "
                    "mtp_num_hidden_layers rms_norm_eps"
                )
                | {
                    "attention_bias": False,
                    "attn_output_gate": True,
                    "dtype": "bfloat16",
                    "full_attention_interval": 4,
                    "hidden_act": "silu",
                    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
                    "mamba_ssm_dtype": "float32",
                    "mlp_only_layers": [],
                    "model_type": "qwen3_5_text",
                    "mtp_use_dedicated_embeddings": False,
                    "use_cache": True,
                    "rope_parameters": {
                        "mrope_interleaved": True,
                        "mrope_section": [11, 11, 10],
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 1e7,
                        "rope_type": "default",
                    },
                }
            },
        ),
        "google/gemma-2b": (
            "gemma",
            _EVERY | _RMS | {"head_dim": 256, "hidden_act": "gelu", "attention_bias": False},
        ),
        "google/gemma-2-9b": (
            "gemma2",
            _EVERY
            | _RMS
            | _any("attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar head_dim")
            | {
                "attention_bias": False,
                "cache_implementation": "hybrid",
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": 4096,
                "sliding_window_size": 4096,
            },
        ),
        "google/gemma-3-1b-it": (
            "gemma3_text",
            _EVERY
            | _RMS
            | {
                "attention_bias": False,
                "attn_logit_softcapping": None,
                "cache_implementation": "hybrid",
                "final_logit_softcapping": None,
                "head_dim": 256,
                "hidden_act": None,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "rope_local_base_freq": 10000,
                "rope_scaling": None,
                "sliding_window": 512,
                "sliding_window_pattern": 6,
            },
        ),
        "microsoft/Phi-3.5-mini-instruct": (
            "phi3",
            _LLAMA
            | {
                "attention_bias": False,
                "embd_pdrop": 0.0,
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "pad_token_id": 1,
                "resid_pdrop": 0.0,
                "rope_scaling": {"long_factor": [1.0], "short_factor": [1.0], "type": "longrope"},
                "sliding_window": 262144,
            },
        ),
        "microsoft/phi-4": (
            "phi3",
            _LLAMA
            | {
                "attention_bias": False,
                "embd_pdrop": 0.0,
                "original_max_position_embeddings": 16384,
                "partial_rotary_factor": 1.0,
                "resid_pdrop": 0.0,
                "sliding_window": None,
            },
        ),
        "microsoft/phi-2": (
            "phi",
            _EVERY
            | {
                "embd_pdrop": 0.0,
                "hidden_act": "gelu_new",
                "layer_norm_eps": 1e-5,
                "partial_rotary_factor": 0.4,
                "qk_layernorm": False,
                "resid_pdrop": 0.1,
                "rope_scaling": None,
                "rope_theta": 1e4,
                "tie_word_embeddings": False,
                "use_cache": True,
            },
        ),
        "deepseek-ai/DeepSeek-V2-Lite": (
            "deepseek_v2",
            _DEEPSEEK
            | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"},
        ),
        "deepseek-ai/DeepSeek-V3": ("deepseek_v3", _DEEPSEEK),
        "moonshotai/Kimi-K2-Instruct": ("kimi_k2", _DEEPSEEK),
        "zai-org/GLM-4-9B-0414": (
            "glm4",
            _LLAMA
            | {"attention_bias": False, "head_dim": 128, "partial_rotary_factor": 0.5}
            | {"pad_token_id": 1},
        ),
        "zai-org/GLM-4.5-Air": ("glm4_moe", _GLM | {"use_qk_norm": False}),
        "openai/gpt-oss-20b": (
            "gpt_oss",
            _LLAMA
            | _any("experts_per_token head_dim initial_context_length num_local_experts")
            | _any("num_experts_per_tok router_aux_loss_coef")
            | {
                "attention_bias": True,
                "experts_per_token": 4,
                "num_experts_per_tok": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 12,
                "num_hidden_layers": 24,
                "output_router_logits": False,
                "sliding_window": 128,
                "swiglu_limit": 7.0,
                "quantization_config": {"quant_method": "mxfp4"},
                "rope_scaling": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "rope_type": "yarn",
                    "truncate": False,
                },
            },
        ),
        "allenai/Olmo-3.1-32B-Instruct": (
            "olmo3",
            _LLAMA
            | {
                "attention_bias": False,
                "layer_types": _FOUR,
                "sliding_window": 4096,
                "rope_scaling": {
                    "attention_factor": 1.2079441541679836,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "yarn",
                },
            },
        ),
        "LGAI-EXAONE/EXAONE-4.0-32B": (
            "exaone4",
            _LLAMA
            | {
                "head_dim": 128,
                "layer_types": _FOUR * 16,
                "rope_scaling": _LLAMA3,
                "sliding_window": 4096,
                "sliding_window_pattern": "LLLG",
            },
        ),
        "HuggingFaceTB/SmolLM3-3B": (
            "smollm3",
            _LLAMA
            | _BIASES
            | {
                "layer_types": ["full_attention"] * 4,
                "max_window_layers": 28,
                "no_rope_layer_interval": 4,
                "no_rope_layers": [1, 1, 1, 0],
                "pretraining_tp": 2,
                "sliding_window": None,
                "use_sliding_window": False,
            },
        ),
        "ibm-granite/granite-3.3-8b-instruct": (
            "granite",
            _LLAMA
            | _BIASES
            | _any("attention_multiplier embedding_multiplier logits_scaling residual_multiplier"),
        ),
        "LiquidAI/LFM2-1.2B": (
            "lfm2",
            _EVERY
            | _any("block_ff_dim block_ffn_dim_multiplier block_multiple_of conv_L_cache")
            | {
                "block_auto_adjust_ff_dim": True,
                "block_dim": 2048,
                "block_mlp_init_scale": 1.0,
                "block_norm_eps": 1e-5,
                "block_out_init_scale": 1.0,
                "block_use_swiglu": True,
                "block_use_xavier_init": True,
                "conv_bias": False,
                "conv_dim": 2048,
                "conv_dim_out": 2048,
                "conv_use_xavier_init": True,
                "full_attn_idxs": [2, 5],
                "hidden_size": 2048,
                "norm_eps": 1e-5,
                "num_attention_heads": 32,
                "num_heads": 32,
                "rope_theta": 1e6,
                "use_cache": True,
                "use_pos_enc": True,
            },
        ),
        # The file says 4096, see WINDOWS.
        "bigcode/starcoder2-3b, without its window": (
            "starcoder2",
            _EVERY
            | {
                "embedding_dropout": 0.1,
                "hidden_act": "gelu_pytorch_tanh",
                "max_position_embeddings": 16384,
                "mlp_type": "default",
                "norm_epsilon": 1e-5,
                "norm_type": "layer_norm",
                "residual_dropout": 0.1,
                "rope_theta": 1e6,
                "sliding_window": None,
                "use_bias": True,
                "use_cache": True,
            },
        ),
        "CohereLabs/c4ai-command-r-v01": (
            "cohere",
            _EVERY
            | {
                "hidden_act": "silu",
                "layer_norm_eps": 1e-5,
                "logit_scale": 0.0625,
                "model_max_length": 131072,
                "rope_theta": 8e6,
                "use_cache": True,
                "use_qk_norm": False,
            },
        ),
        "CohereLabs/c4ai-command-r7b-12-2024": (
            "cohere2",
            _EVERY
            | {
                "cache_implementation": "hybrid",
                "head_dim": 128,
                "hidden_act": "silu",
                "layer_norm_eps": 1e-5,
                "layer_switch": 4,
                "logit_scale": 0.25,
                "order_of_interleaved_layers": "local_attn_first",
                "position_embedding_type": "rope_gptj",
                "rope_scaling": None,
                "rope_theta": 50000,
                "rotary_pct": 1.0,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "use_cache": True,
                "use_embedding_sharing": True,
                "use_gated_activation": True,
                "use_parallel_block": True,
                "use_parallel_embedding": True,
            },
        ),
        "internlm/internlm2_5-7b-chat": (
            "internlm2",
            _LLAMA
            | {"attn_implementation": "eager", "bias": False, "pretraining_tp": 1, "auto_map": {}}
            | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "pad_token_id": 2},
        ),
        "baidu/ERNIE-4.5-21B-A3B-PT": (
            "ernie4_5_moe",
            _LLAMA
            | _any(
                "head_dim moe_capacity moe_intermediate_size moe_k moe_layer_end_index "
                "moe_layer_interval moe_layer_start_index moe_num_experts moe_num_shared_experts"
            )
            | {
                "moe_gate": "topk",
                "moe_use_aux_free": True,
                "num_nextn_predict_layers": 1,
                "use_bias": False,
            },
        ),
        "baidu/ERNIE-4.5-0.3B-PT": ("ernie4_5", _LLAMA | {"head_dim": 128, "use_bias": False}),
        "tencent/Hunyuan-7B-Instruct": (
            "hunyuan_v1_dense",
            _LLAMA
            | {
                "attention_bias": False,
                "attention_head_dim": 128,
                "eod_token_id": 1,
                "head_dim": 128,
                "mlp_bias": False,
                "norm_type": "rms",
                "rope_scaling": {
                    "alpha": 1000.0,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "factor": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "type": "dynamic",
                },
                "use_cla": False,
                "use_qk_norm": True,
            },
        ),
        "ByteDance-Seed/Seed-OSS-36B-Instruct": (
            "seed_oss",
            _LLAMA
            | {
                "attention_bias": True,
                "attention_out_bias": False,
                "head_dim": 128,
                "mlp_bias": False,
                "pretraining_tp": 1,
                "residual_dropout": 0.1,
                "rope_scaling": {"rope_type": "default"},
            },
        ),
        "swiss-ai/Apertus-8B-Instruct": (
            "apertus",
            _LLAMA
            | {
                "attention_bias": False,
                "hidden_act": "xielu",
                "hidden_dropout": 0.0,
                "mlp_bias": False,
                "post_norm": False,
                "qk_norm": True,
                "rope_scaling": _LLAMA3,
            },
        ),
        "MiniMaxAI/MiniMax-M3": (
            "minimax_m3_vl",
            {
                "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
                "image_token_index": 1,
                "video_token_index": 1,
                "tie_word_embeddings": False,
                "torch_dtype": "bfloat16",
                "vision_config": {"hidden_size": 1280},
                "text_config": _any(
                    "dense_intermediate_size hidden_size intermediate_size num_attention_heads "
                    "num_experts_per_tok num_key_value_heads num_local_experts num_mtp_modules "
                    "shared_intermediate_size vocab_size"
                )
                | {
                    "architectures": ["MiniMaxM3SparseForCausalLM"],
                    "attention_output_gate": False,
                    "head_dim": 128,
                    "hidden_act": "swigluoai",
                    "max_position_embeddings": 524288,
                    "model_type": "minimax_m3",
                    "moe_layer_freq": [0, 1],
                    "n_shared_experts": 1,
                    "num_hidden_layers": 2,
                    "partial_rotary_factor": 0.5,
                    "qk_norm_type": "per_head",
                    "rms_norm_eps": 1e-6,
                    "rope_theta": 5000000,
                    "rotary_dim": 64,
                    "routed_scaling_factor": 2.0,
                    "scoring_func": "sigmoid",
                    "sparse_attention_config": {
                        "sparse_attention_freq": [0, 1],
                        "sparse_block_size": 128,
                        "sparse_disable_index_value": [0, 1],
                        "sparse_index_dim": 128,
                        "sparse_init_block": 0,
                        "sparse_local_block": 1,
                        "sparse_num_index_heads": 4,
                        "sparse_score_type": "max",
                        "sparse_topk_blocks": 16,
                        "use_sparse_attention": True,
                    },
                    "swiglu_alpha": 1.702,
                    "swiglu_limit": 7.0,
                    "tie_word_embeddings": False,
                    "use_gemma_norm": True,
                    "use_qk_norm": True,
                    "use_routing_bias": True,
                },
            },
        ),
        "MiniMaxAI/MiniMax-M2": (
            "minimax_m2",
            _LLAMA
            | _any("head_dim num_experts_per_tok num_local_experts rotary_dim num_mtp_modules")
            | _any("initializer_range mtp_transformer_layers router_aux_loss_coef")
            | {
                "attn_type_list": [1, 1],
                "num_hidden_layers": 2,
                "layernorm_full_attention_beta": 1.0,
                "layernorm_linear_attention_beta": 1.0,
                "layernorm_mlp_beta": 1.0,
                "max_model_len": 1,
                "output_router_logits": False,
                "qk_norm_type": "per_layer",
                "router_jitter_noise": 0.0,
                "scoring_func": "sigmoid",
                "shared_intermediate_size": 0,
                "shared_moe_mode": "sigmoid",
                "sliding_window": None,
                "swa_rope_theta": -1.0,
                "use_mtp": True,
                "use_qk_norm": True,
                "use_routing_bias": True,
            },
        ),
        "tiiuae/Falcon-H1-0.5B-Base": (
            "falcon_h1",
            _LLAMA
            | _any(
                "attention_in_multiplier attention_out_multiplier embedding_multiplier head_dim "
                "key_multiplier lm_head_multiplier mamba_chunk_size mamba_d_conv mamba_d_head "
                "mamba_d_ssm mamba_d_state mamba_n_groups mamba_n_heads mlp_expansion_factor "
                "num_logits_to_keep ssm_in_multiplier ssm_out_multiplier"
            )
            | {
                "attention_bias": False,
                "attn_layer_indices": None,
                "mamba_conv_bias": True,
                "mamba_expand": 2,
                "mamba_norm_before_gate": False,
                "mamba_proj_bias": False,
                "mamba_rms_norm": False,
                "mamba_use_mlp": True,
                "mlp_bias": False,
                "mlp_multipliers": [1.0, 1.0],
                "projectors_bias": False,
                "ssm_multipliers": [1.0] * 5,
            },
        ),
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B": (
            "nemotron_h",
            _EVERY
            | _any(
                "chunk_size conv_kernel expand head_dim mamba_head_dim mamba_num_heads "
                "moe_intermediate_size moe_shared_expert_intermediate_size n_group n_groups "
                "n_routed_experts n_shared_experts num_experts_per_tok num_logits_to_keep "
                "routed_scaling_factor ssm_state_size time_step_floor time_step_max "
                "topk_group rope_theta"
            )
            | {
                "attention_bias": False,
                "hidden_dropout": 0.0,
                "hybrid_override_pattern": "ME*",
                "layer_norm_epsilon": 1e-5,
                "mamba_hidden_act": "silu",
                "mamba_proj_bias": False,
                "mamba_ssm_cache_dtype": "float32",
                "mlp_bias": False,
                "mlp_hidden_act": "relu2",
                "norm_eps": 1e-5,
                "norm_topk_prob": True,
                "partial_rotary_factor": 1.0,
                "rescale_prenorm_residual": True,
                "residual_in_fp32": False,
                "sliding_window": None,
                "tie_word_embeddings": False,
                "time_step_limit": [0.0, float("inf")],
                "time_step_min": 0.001,
                "use_bias": False,
                "use_cache": True,
                "use_conv_bias": True,
                "use_mamba_kernels": True,
            },
        ),
        "ai21labs/AI21-Jamba-Mini-1.5": (
            "jamba",
            _EVERY
            | _any(
                "attn_layer_offset attn_layer_period expert_layer_offset expert_layer_period "
                "mamba_d_conv mamba_d_state mamba_dt_rank mamba_expand num_experts "
                "num_experts_per_tok num_logits_to_keep rms_norm_eps router_aux_loss_coef"
            )
            | {
                "hidden_act": "silu",
                "mamba_conv_bias": True,
                "mamba_proj_bias": False,
                "output_router_logits": False,
                "sliding_window": None,
                "tie_word_embeddings": False,
                "use_cache": True,
                "use_mamba_kernels": True,
            },
        ),
        "moonshotai/Kimi-Linear-48B-A3B": (
            "kimi_linear",
            _LLAMA
            | _any(
                "first_k_dense_replace head_dim kv_lora_rank moe_intermediate_size moe_layer_freq "
                "num_expert_group num_experts num_experts_per_token num_nextn_predict_layers "
                "num_shared_experts qk_nope_head_dim qk_rope_head_dim routed_scaling_factor "
                "topk_group v_head_dim model_max_length"
            )
            | {
                "linear_attn_config": {
                    "full_attn_layers": [4],
                    "head_dim": 128,
                    "kda_layers": [1, 2, 3],
                    "num_heads": 32,
                    "short_conv_kernel_size": 4,
                },
                "mla_use_nope": True,
                "moe_renormalize": True,
                "moe_router_activation_func": "sigmoid",
                "q_lora_rank": None,
                "use_grouped_topk": True,
            },
        ),
        "openbmb/MiniCPM3-4B": (
            "minicpm3",
            _LLAMA
            | _any("dim_model_base kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim")
            | {
                "attention_bias": False,
                "auto_map": {},
                "rope_scaling": {
                    "long_factor": [1.0],
                    "original_max_position_embeddings": 32768,
                    "short_factor": [1.0],
                    "type": "longrope",
                },
                "scale_depth": 1.4,
                "scale_emb": 12,
            },
        ),
        "openai-community/gpt2": (
            "gpt2",
            _any("bos_token_id eos_token_id initializer_range n_embd n_head n_layer vocab_size")
            | {
                "activation_function": "gelu_new",
                "architectures": ["Any"],
                "attn_pdrop": 0.1,
                "embd_pdrop": 0.1,
                "layer_norm_epsilon": 1e-5,
                "n_ctx": 1024,
                "n_positions": 1024,
                "resid_pdrop": 0.1,
                "summary_activation": None,
                "summary_first_dropout": 0.1,
                "summary_proj_to_labels": True,
                "summary_type": "cls_index",
                "summary_use_proj": True,
                "task_specific_params": {"text-generation": {"do_sample": True}},
            },
        ),
    }.items()
}

#: Windows that transformers applies and mlx-lm's modules do not; rejected by `sliding_window`.
WINDOWS: dict[str, Config] = {
    "mistralai/Mistral-7B-v0.1": _LLAMA
    | {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096},
    "microsoft/Phi-3-mini-4k-instruct": CONFIGS["microsoft/phi-4"]
    | {"max_position_embeddings": 4096, "sliding_window": 2047},
    "bigcode/starcoder2-3b": CONFIGS["bigcode/starcoder2-3b, without its window"]
    | {"sliding_window": 4096},
}

#: Whole files by name, of models that were once wrongly rejected; long values are cut.
FILES: list[tuple[str, Config]] = [
    (row["name"], row["config"])
    for row in map(json.loads, Path(__file__).with_suffix(".jsonl").read_text().splitlines())
]
