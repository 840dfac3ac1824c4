# SPDX-License-Identifier: Apache-2.0
"""Small models of families with latent attention, soft caps or shared K and V."""

from engine.models.recurrent import Family

MLA = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "attention_bias": False,
}
EXPERTS = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
#: Kimi's delta attention, in three of four layers.
KDA = {
    "full_attn_layers": [4],
    "kda_layers": [1, 2, 3],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
_LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0] * 4,
}

FAMILIES = {
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3ForCausalLM", MLA | EXPERTS),
    "glm4_moe_lite": Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", MLA | EXPERTS),
    # Keys and values of different sizes.
    "minicpm3": Family(
        "minicpm3",
        "MiniCPM3ForCausalLM",
        MLA
        | {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0, "rope_scaling": _LONGROPE},
    ),
    # Latents beside states.
    "kimi_linear": Family(
        "kimi_linear",
        "KimiLinearForCausalLM",
        MLA
        | {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "q_lora_rank": None,
            "linear_attn_config": KDA,
            "model_max_length": 4096,
            "mla_use_nope": True,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "moe_layer_freq": 1,
            "use_grouped_topk": True,
        },
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attn_logit_softcapping": 2.0,  # low, so that it has an effect
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 16,
            "sliding_window": 4096,
        },
    ),
    # The last two layers read K and V of earlier ones.
    "gemma4_text": Family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
            "attention_k_eq_v": False,
        },
    ),
}
