# SPDX-License-Identifier: Apache-2.0
"""Settings of the small models that make_toys.py converts to GGUF."""

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
LINEAR = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
FULL, WINDOW = "full_attention", "sliding_attention"
Toy = tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], dict[str, Any]]
#: Maps names to the configuration's class, differences from BASE, and differences of the hub's
#: config.json from what transformers writes; None: the key is absent.
TOYS: dict[str, Toy] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "attention_bias": True}),
    "llama3": (
        "LlamaConfig",
        {
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e6,
                "factor": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {**EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True},
    ),
    "qwen35": ("Qwen3_5TextConfig", LINEAR),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig",
        {**LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 6,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                **YARN,
                "rope_theta": 150000.0,
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None}),
    "phi3-longrope": (
        "Phi3Config",
        {
            "sliding_window": None,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "short_factor": [1.0, 1.1, 1.2, 1.3],
            },
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "glm4moe": (
        "Glm4MoeConfig",
        {
            **DEEPSEEK,
            "head_dim": 16,
            "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek3": (
        "DeepseekV3Config",
        {**LATENT, **DEEPSEEK, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0},
    ),
    "deepseek3-yarn": (
        "DeepseekV3Config",
        {
            **LATENT,
            **DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 320,
            "rope_parameters": {
                **YARN,
                "rope_theta": 10000.0,
                "factor": 40.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 3,
            "block_multiple_of": 16,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "granite": ("GraniteConfig", GRANITE),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 6,
            "attn_implementation": "eager",
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 272,
            "num_kv_shared_layers": 2,
            "sliding_window": 6,
            "layer_types": [WINDOW, WINDOW, FULL] * 2,
            "use_double_wide_mlp": True,
            "num_global_key_value_heads": None,
        },
    ),
    "phi2": (
        "PhiConfig",
        {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "intermediate_size": 128},
    ),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None, "use_bias": True}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 6, "num_hidden_layers": 4}),
    "command-r-plus": ("CohereConfig", {"logit_scale": 0.25, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2Config",
        {"logit_scale": 0.25, "sliding_window": 6, "num_hidden_layers": 4, "head_dim": 8},
        {"rotary_pct": 1.0},
    ),
    "exaone4": (
        "Exaone4Config",
        {"sliding_window": 6, "sliding_window_pattern": 4, "num_hidden_layers": 4, "head_dim": 16},
    ),
    "hunyuan-dense": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "seed_oss": (
        "SeedOssConfig",
        {"head_dim": 16, "attention_bias": True, "attention_out_bias": False},
    ),
    "nemotron": ("NemotronConfig", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "qwen3vl": (
        "Qwen3Config",
        {"head_dim": 16},
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default"},
        },
    ),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
}
