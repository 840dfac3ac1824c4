# SPDX-License-Identifier: Apache-2.0
"""Writes a hybrid, a similar dense model and a tiny draft model, with random weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

VOCABULARY = 32000
CONTEXT = 4096  # tokens, at most

_COMMON = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
#: Maps models to config.json: Qwen3-Next's layers with dense MLPs, Qwen3's, and Llama's.
MODELS = {
    "hybrid": _COMMON
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": list(range(8)),
        "norm_topk_prob": True,
    },
    "dense": _COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "draft": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
}


def write_model(name: str, folder: Path) -> int:
    """Writes a model folder with random weights; returns the number of parameters."""
    config = MODELS[name]
    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = family.Model(family.ModelArgs.from_dict(config))
    arrays = dict(tree_flatten(model.parameters()))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    return sum(array.size for array in arrays.values())
