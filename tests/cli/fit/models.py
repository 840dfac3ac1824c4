# SPDX-License-Identifier: Apache-2.0
"""Writes small random models of all kinds that differ in their memory needs."""

import importlib
import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from engine.models.latent import EXPERTS as ROUTED
from engine.models.latent import MLA
from mlx.utils import tree_flatten

from vllm_metal.cli.fit import engine
from vllm_metal.cli.fit.estimate import Model

BASE = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 600,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
GROUPED = {"num_key_value_heads": 2}
TIED = {"tie_word_embeddings": True}
WINDOWS = {"sliding_window": 48, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
STATES = EXPERTS | {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.5,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 64,
}
CONVOLUTIONS = {
    "rms_norm_eps": None,
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 128,
    "block_ff_dim": 320,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}
LATENTS = MLA | ROUTED | {"moe_intermediate_size": 64, "head_dim": None}
INDEXER = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
BLOCKS = {
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_parameters": None,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "dense_intermediate_size": 320,
    "shared_intermediate_size": 64,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1, 1],
        "sparse_block_size": 16,
        "sparse_index_dim": 128,
        "sparse_local_block": 1,
        "sparse_num_index_heads": 2,
        "sparse_topk_blocks": 4,
    },
}
OF_KERNELS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # as the kernels require
TWO_SIZES = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 48,
    "global_head_dim": 64,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": None,
}
PER_LAYER = TWO_SIZES | {
    "rope_theta": None,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 600,
}
#: model_type, changes to BASE, and bits of quantized weights.
MODELS = {
    "llama": ("llama", {}, None),
    "llama, grouped, tied": ("llama", GROUPED | TIED, None),
    "llama, 4 bits": ("llama", GROUPED, 4),
    "llama, 8 bits, tied": ("llama", GROUPED | TIED, 8),
    "llama, bfloat16": ("llama", GROUPED | {"torch_dtype": "bfloat16"}, None),
    "qwen2, biases": ("qwen2", GROUPED | TIED, None),
    "qwen3, norms of heads": ("qwen3", GROUPED, None),
    "gemma3, windows": ("gemma3_text", GROUPED | TIED | WINDOWS, None),
    "phi3, fused": ("phi3", GROUPED, None),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, None),
    "qwen3_moe, 4 bits": ("qwen3_moe", GROUPED | TIED | EXPERTS, 4),
    "lfm2, convolutions": ("lfm2", GROUPED | TIED | CONVOLUTIONS, None),
    "starcoder2": (
        "starcoder2",
        GROUPED | TIED | {"norm_epsilon": 1e-5, "rms_norm_eps": None},
        None,
    ),
}
#: Models with slow CPU forward passes, which are not compared: a recurrence is a chain of small
#: operations, in which MLX runs far ahead of the computation.
OTHERS = {
    "qwen3_next, states": ("qwen3_next", GROUPED | STATES | {"num_experts": 0}, None),
    "deepseek_v3, latents": ("deepseek_v3", LATENTS, None),
    "deepseek_v32, index keys": ("deepseek_v32", LATENTS | INDEXER | OF_KERNELS, None),
    "minimax_m3, index keys": (
        "minimax_m3_vl",
        GROUPED | {"head_dim": 128, "text_config": BASE | GROUPED | BLOCKS},
        None,
    ),
    "gemma4, heads of two sizes": ("gemma4_text", GROUPED | TIED | TWO_SIZES, None),
    "gemma4, per layer": ("gemma4_text", GROUPED | TIED | PER_LAYER, None),
    "gemma4, per layer, 4 bits": ("gemma4_text", GROUPED | TIED | PER_LAYER, 4),
}
ARCHITECTURES = {
    "gemma4_text": "Gemma4ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "starcoder2": "Starcoder2ForCausalLM",
}
#: Extra tensors that the families above drop on loading.
DROPPED = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(16)}


def write(folder, name):
    """Writes a model with random weights; returns its folder."""
    model_type, changes, bits = (MODELS | OTHERS)[name]
    config = (
        BASE | changes | {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]]}
    )
    folder.mkdir(parents=True, exist_ok=True)
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, config["torch_dtype"]))
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(model, **config["quantization"])
    weights = dict(tree_flatten(model.parameters()))
    if model_type == "llama":
        weights |= DROPPED
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def token_bytes(name, element_bytes, scale_bytes=0):
    """Calculates the K/V bytes per token over all layers."""
    config = BASE | MODELS[name][1]
    row = config["head_dim"] * element_bytes + scale_bytes
    attending = len(config.get("full_attn_idxs", range(config["num_hidden_layers"])))
    return 2 * attending * config["num_key_value_heads"] * row


def settings(folder, dtype, **changes):
    """Returns vLLM's configuration and the loader's path of the model."""
    content = json.loads((folder / "config.json").read_text())
    options = {
        "model_type": content["model_type"],
        "dtype": dtype,
        "cache_dtype": "auto",
        "block_size": 16,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    config = engine.config(**(options | changes))
    config.model_config.model = str(folder)
    config.model_config.revision = None
    config.model_config.trust_remote_code = False
    config.model_config.hf_overrides = {}
    object.__setattr__(config, "load_config", SimpleNamespace(download_dir=None))
    return config


def read(folder, dtype, pools=False, **options):
    content = json.loads((folder / "config.json").read_text())
    return Model.read(folder, content["model_type"], dtype, pools, **options)
