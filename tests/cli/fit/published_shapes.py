# SPDX-License-Identifier: Apache-2.0
"""config.json of well-known models from the hub, with the keys that determine sizes."""

from __future__ import annotations

from typing import Any

from vllm_metal.cli.fit.known import KNOWN, KnownModel

_COMMON = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 64, "bits": 4},
}


def _known(name: str) -> dict[str, Any]:
    return next(dict(each.config) for each in KNOWN if each.name.endswith(f"/{name}"))


_QWEN3 = _known("Qwen3-0.6B-4bit") | {"tie_word_embeddings": False}
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_QWEN_80B = _COMMON | {
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
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
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


def _text(label: str, name: str) -> KnownModel:
    """Returns the text model of a known multimodal model."""
    config = {key: value for key, value in _known(name).items() if key != "vision_config"}
    return KnownModel(label, config)


def _qwen3(size: str, shape: tuple[int, int, int, int], **changes: Any) -> KnownModel:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return KnownModel(f"Qwen3-{size}", _QWEN3 | dict(zip(names, shape, strict=True)) | changes)


#: Qwen3 by size.
QWEN3 = {
    model.name.removeprefix("Qwen3-"): model
    for model in (
        _qwen3("0.6B", (1024, 3072, 28, 16), tie_word_embeddings=True),
        _qwen3("1.7B", (2048, 6144, 28, 16), tie_word_embeddings=True),
        _qwen3("4B", (2560, 9728, 36, 32), tie_word_embeddings=True),
        _qwen3("8B", (4096, 12288, 36, 32)),
        _qwen3("14B", (5120, 17408, 40, 40)),
        _qwen3("32B", (5120, 25600, 64, 64)),
        _qwen3("30B-A3B", (2048, 6144, 48, 32), **_EXPERTS),
    )
}
#: Hybrids. Qwen3.6 has the shapes of Qwen3.5.
QWEN_27B = _text("Qwen3.5-27B", "Qwen3.6-27B-4bit")
QWEN_80B = KnownModel("Qwen3-Next-80B-A3B", _QWEN_80B)
GRANITE = KnownModel("Granite-4.0-H-Small", _GRANITE)
