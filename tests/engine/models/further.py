# SPDX-License-Identifier: Apache-2.0
"""Small models of mlx-lm's other families with states or latent attention."""

from engine.models import latent, recurrent
from engine.models.latent import EXPERTS, KDA, MLA
from engine.models.recurrent import DELTA, MOE, Family

_INDEXER = {"index_head_dim": 16, "index_n_heads": 16, "index_topk": 8}
_BAILING = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "layer_group_size": 4,
    "group_norm_size": 2,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "score_function": "sigmoid",
}
# Entries of two tokens and of one, layers that read those of others, and choices that are shared or
# among the blocks of an earlier one. Widths are no multiples of blocks that the module quantizes.
V41 = {
    "num_hidden_layers": 7,
    "head_dim": 40,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1],
    "compress_rope_theta": 700.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8,
        "beta_slow": 1,
    },
    "kv_source_layer_ids": [1, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 3,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 8,
    "swiglu_limit": 0.3,
    "hc_mult": 3,
}
_LATENTS = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
_LONGCAT = {
    **_LATENTS,
    "v_head_dim": 16,
    "num_layers": 2,
    "num_hidden_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    "routed_scaling_factor": 1.0,
}
_KIMI_K3 = {
    **_LATENTS,
    "model_type": "kimi_linear",
    "v_head_dim": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "situ",
    "activation_situ_beta": 1.0,
    "activation_situ_linear_beta": 4.0,
    "attn_res_block_size": 2,
    "linear_attn_config": KDA | {"gate_lower_bound": -5.0},
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_expert_hidden_size": 32,
}

_QWEN = DELTA | {
    "model_type": "qwen3_5_text",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
# The last two layers read K and V of earlier ones.
_GEMMA_3N = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 6,
    "head_dim": 16,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 24,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.5] * 2 + [0.0] * 4,
    "intermediate_size": [96] * 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "rope_scaling": None,
}

FAMILIES = {
    "bailing_hybrid": Family(
        "bailing_hybrid", "BailingMoeV2_5ForCausalLM", _BAILING | _LATENTS | {"v_head_dim": 16}
    ),
    "bailing_moe_linear": Family("bailing_moe_linear", "BailingMoeLinearV2ForCausalLM", _BAILING),
    "bailing_moe_v3": Family(
        "bailing_moe_v3",
        "BailingMoeV3ForCausalLM",
        _BAILING
        | _LATENTS
        | {"v_head_dim": 16, "short_conv_kernel_size": 4, "group_norm_size": None},
    ),
    "gear": Family(
        "gear",
        "GearForCausalLM",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
            "sliding_window": 24,
            "conv_L_cache": 3,
        },
    ),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {
            "num_hidden_layers": 4,
            "attention_bias": False,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.25,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_chunk_size": 16,
            "position_embedding_type": "nope",
        },
    ),
    "kimi_k3": Family("kimi_k3", "KimiK3ForConditionalGeneration", {"text_config": _KIMI_K3}),
    "lfm2_moe": Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "use_expert_bias": True,
            "num_dense_layers": 1,
            "conv_bias": False,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
    ),
    "longcat_flash": Family("longcat_flash", "LongcatFlashForCausalLM", _LONGCAT),
    "mamba": Family(
        "mamba",
        "MambaForCausalLM",
        {
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 8,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
            "expand": 2,
        },
    ),
    "mistral4": Family(
        "mistral4",
        "Mistral4ForCausalLM",
        MLA
        | EXPERTS
        | {
            "topk_method": None,
            "scoring_func": None,
            "qk_head_dim": 24,
            "head_dim": 24,
            "rope_interleave": True,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "attention_bias": False,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "mamba_proj_bias": False,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "n_groups": 1,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "hybrid_override_pattern": "M-M*-",
        },
    ),
    "olmo_hybrid": Family(
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        DELTA
        | {
            "num_key_value_heads": 4,
            "linear_num_key_heads": 4,
            "full_attention_interval": None,
            "linear_allow_neg_eigval": True,
            "attention_bias": False,
            "partial_rotary_factor": None,
        },
    ),
    "rwkv7": Family(
        "rwkv7",
        "RWKV7ForCausalLM",
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "a_low_rank_dim": 8,
            "v_low_rank_dim": 8,
            "gate_low_rank_dim": 8,
            "decay_low_rank_dim": 8,
        },
    ),
    "youtu_llm": Family("youtu_llm", "YoutuLLMForCausalLM", MLA | {"mlp_bias": False}),
    "deepseek_v2": Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        MLA
        | EXPERTS
        | {
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 2048,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
}
FAMILIES |= {
    "qwen3_5": Family("qwen3_5", "Qwen3_5ForConditionalGeneration", {"text_config": _QWEN}),
    "qwen3_5_moe": Family(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": _QWEN | MOE | {"model_type": "qwen3_5_moe_text"}},
    ),
    "kimi_vl": Family(
        "kimi_vl",
        "KimiVLForConditionalGeneration",
        {"text_config": MLA | EXPERTS | {"model_type": "deepseek_v3"}},
    ),
    "gemma3n": Family("gemma3n", "Gemma3nForConditionalGeneration", {"text_config": _GEMMA_3N}),
}
FAMILIES |= {
    # K and V are mixed with those of the previous token.
    "baichuan_m1": Family(
        "baichuan_m1",
        "BaichuanM1ForCausalLM",
        {
            "num_hidden_layers": 4,
            "conv_window": 2,
            "sliding_window": 24,
            "sliding_window_layers": [1, 3],
            "num_swa_attention_heads": 4,
            "num_swa_key_value_heads": 2,
        },
    ),
    # The previous tokens are a state.
    "longcat_flash_ngram": Family(
        "longcat_flash_ngram",
        "LongcatFlashNgramForCausalLM",
        _LONGCAT | {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    ),
    "plamo2": Family(
        "plamo2",
        "Plamo2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "hidden_size_per_head": 16,
            "mamba_d_state": 8,
            "mamba_num_heads": 8,
            "mamba_step": 2,
        },
    ),
    "deepseek_v41": Family("deepseek_v41", "DeepseekV41ForCausalLM", {"text_config": V41}),
    # Latents with an indexer that selects positions. With few heads of it, scores are often equal.
    "deepseek_v32": Family("deepseek_v32", "DeepseekV32ForCausalLM", MLA | EXPERTS | _INDEXER),
    "glm_moe_dsa": Family(
        "glm_moe_dsa",
        "GlmMoeDsaForCausalLM",
        MLA
        | EXPERTS
        | _INDEXER
        | {
            "indexer_types": ["full", "shared", "shared"],
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    ),
}
#: These and the two other tables together.
ALL = recurrent.FAMILIES | latent.FAMILIES | FAMILIES
#: Models of mlx-lm that the paged path rejects, with words of the reason.
REFUSED = {
    "phi3small": (
        Family(
            "phi3small",
            "Phi3SmallForCausalLM",
            {
                "num_hidden_layers": 2,
                # The module leaves some of these out, by number.
                "vocab_size": 100352,
                "dense_attention_every_n_layers": 2,
                "ff_intermediate_size": 96,
                "gegelu_limit": 20.0,
                "layer_norm_epsilon": 1e-5,
                "blocksparse_block_size": 32,
                "blocksparse_num_local_blocks": 1,
                "blocksparse_vert_stride": 2,
            },
        ),
        "attention in layers.0 with code of its own",
    ),
}
