# SPDX-License-Identifier: Apache-2.0
"""config.json of well-known models as the hub has them, for the keys that size them."""

from __future__ import annotations

from typing import Any

from vllm_metal.commands.fit.known import KNOWN, KnownModel

_COMMON = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 64, "bits": 4},
}
_LLAMA_70B = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
_QWEN_32B = KNOWN[1].config | {
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
}
_GEMMA_27B = _COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}
_GLM_AIR = _COMMON | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 131072,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "use_qk_norm": False,
    "attention_bias": True,
}
_OSS = _COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    # As published: experts in MXFP4; the rest in 8 bits, as mlx-community converts it.
    "quantization": {"group_size": 64, "bits": 8},
}
_GLM_FLASH = _COMMON | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
}
_DEEPSEEK_V3 = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
_DELTA = _COMMON | {
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
}
_QWEN_27B = _DELTA | {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_value_heads": 48,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
_QWEN_35B = _QWEN_27B | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_QWEN_80B = _DELTA | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_GRANITE = _COMMON | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
    "hidden_size": 4096,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "max_position_embeddings": 131072,
    "layer_types": ["attention" if index % 10 == 5 else "mamba" for index in range(40)],
    "position_embedding_type": "nope",
    "rope_theta": 10000,
    "attention_bias": False,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 16,
    "residual_multiplier": 0.22,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def _multimodal(name: str, family: str, text: dict[str, Any]) -> KnownModel:
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": family,
        "text_config": text,
        "torch_dtype": "bfloat16",
        "quantization": _COMMON["quantization"],
    }
    return KnownModel(name, config)


def _gpt_oss(size: str, layers: int, experts: int) -> KnownModel:
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": types}
    return KnownModel(f"gpt-oss-{size}", _OSS | sizes)


#: Dense, with windows.
QWEN_32B = KnownModel("Qwen3-32B", _QWEN_32B)
LLAMA_70B = KnownModel("Llama-3.3-70B", _LLAMA_70B)
GEMMA_27B = KnownModel("Gemma-3-27B", _GEMMA_27B)
#: Of experts.
GPT_OSS_20B = _gpt_oss("20b", 24, 32)
GPT_OSS_120B = _gpt_oss("120b", 36, 128)
GLM_AIR = KnownModel("GLM-4.5-Air", _GLM_AIR)
#: Hybrids.
QWEN_27B = _multimodal("Qwen3.5-27B", "qwen3_5", _QWEN_27B)
QWEN_35B = _multimodal("Qwen3.5-35B-A3B", "qwen3_5_moe", _QWEN_35B)
QWEN_80B = KnownModel("Qwen3-Next-80B-A3B", _QWEN_80B)
GRANITE = KnownModel("Granite-4.0-H-Small", _GRANITE)
#: With latents.
GLM_FLASH = KnownModel("GLM-4.7-Flash", _GLM_FLASH)
DEEPSEEK_V3 = KnownModel("DeepSeek-V3", _DEEPSEEK_V3)
