# SPDX-License-Identifier: Apache-2.0
"""Small models of mlx-lm's modules that read a `text_config`, mostly of multimodal files."""

from engine.models.recurrent import VOCAB, Family

ODD = {
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
HEAD = {"head_dim": 16}
LAYERS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
EXPERTS = {
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
_PACKED = {
    "model_type": "qwen3_5_text",
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
#: Linear layers with two bits.
PACKED = Family(
    "prism_hadamard_qwen35",
    "PrismHadamardForCausalLM",
    {
        "schema_version": 1,
        "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": f"model.layers.{layer}.mlp.{name}_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            }
            for layer in (0, 3)
            for name in ("gate", "up")
        ],
        "text_config": _PACKED,
    },
)
#: Multimodal files with a served text model, which has another module or its own.
_TEXT = {**ODD, **HEAD}
FAMILIES = {
    module: Family(module, architecture, {"vocab_size": VOCAB, "text_config": config})
    for module, architecture, config in (
        (
            "gemma3",
            "Gemma3ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "gemma3_text",
                "sliding_window": 7,
                "sliding_window_pattern": 2,
                "query_pre_attn_scalar": 20,
            },
        ),
        (
            "gemma4",
            "Gemma4ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "gemma4_text",
                "global_head_dim": 24,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": 64,
                "hidden_size_per_layer_input": 10,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "final_logit_softcapping": 5.0,
            },
        ),
        (
            "kimi_k25",
            "KimiK25ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "kimi_k25",
                "num_key_value_heads": 6,
                "q_lora_rank": 24,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 20,
                "moe_intermediate_size": 40,
                "n_routed_experts": 6,
                "n_shared_experts": 1,
                "num_experts_per_tok": 3,
                "first_k_dense_replace": 1,
                "routed_scaling_factor": 1.7,
                "n_group": 3,
                "topk_group": 2,
            },
        ),
        (
            "lfm2-vl",
            "Lfm2VlForConditionalGeneration",
            ODD
            | {
                "model_type": "lfm2",
                "conv_bias": True,
                "conv_L_cache": 3,
                "block_dim": 72,
                "block_ff_dim": 88,
                "block_multiple_of": 8,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": False,
                "layer_types": ["conv", "full_attention", "full_attention", "conv"],
            },
        ),
        (
            "llama4",
            "Llama4ForConditionalGeneration",
            _TEXT
            | {
                "model_type": "llama4_text",
                "attention_bias": True,
                "attention_chunk_size": 512,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 56,
                "num_experts_per_tok": 1,
                "num_local_experts": 5,
                "rope_scaling": None,
                "use_qk_norm": True,
                "attn_temperature_tuning": 4,
                "floor_scale": 16,
            },
        ),
        (
            "minimax_m3_vl",
            "MiniMaxM3VLForConditionalGeneration",
            _TEXT
            | {
                "model_type": "minimax_m3",
                "dense_intermediate_size": 88,
                "intermediate_size": 40,
                "shared_intermediate_size": 40,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "partial_rotary_factor": 0.5,
                "routed_scaling_factor": 1.7,
                "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
                "sparse_attention_config": {
                    "use_sparse_attention": True,
                    "sparse_attention_freq": [0, 1, 1, 1],
                    "sparse_block_size": 16,
                    "sparse_disable_index_value": [0, 1, 1, 1],
                    "sparse_index_dim": 16,
                    "sparse_init_block": 0,
                    "sparse_local_block": 1,
                    "sparse_num_index_heads": 2,
                    "sparse_score_type": "max",
                    "sparse_topk_blocks": 2,
                },
            },
        ),
        (
            "mistral3",
            "Mistral3ForConditionalGeneration",
            _TEXT | {"model_type": "mistral", "sliding_window": 7},
        ),
        (
            "pixtral",
            "PixtralForConditionalGeneration",
            _TEXT | {"model_type": "mistral", "sliding_window": 7},
        ),
        (
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            ODD | {"model_type": "qwen2"},
        ),
        ("qwen3_vl", "Qwen3VLForConditionalGeneration", _TEXT | {"model_type": "qwen3"}),
        (
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            _TEXT
            | EXPERTS
            | {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [1]},
        ),
        (
            "muse_spark",
            "MuseSparkForConditionalGeneration",
            _TEXT
            | {
                "post_norm_eps": 1e-8,
                "rope_parameters": {"rope_theta": 10000.0},
                "layer_rope_theta": [10000.0, 0, 0, 10000.0],
                "layer_types": LAYERS,
                "sliding_window": 7,
                "final_logit_softcapping": 5.0,
                "output_multiplier": 0.7,
                "num_local_experts": 5,
                "num_experts_per_tok": 2,
                "moe_hidden_size": 40,
                "moe_intermediate_size": 48,
                "qk_scale_factor": 1.7,
                "routed_scaling_factor": 1.7,
            },
        ),
    )
}
