# SPDX-License-Identifier: Apache-2.0
"""Small random models on disk, of the kinds that differ in what they need."""

import importlib
import json
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from vllm_metal.commands.fit import engine
from vllm_metal.commands.fit.estimate import Model

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
#: model_type, changes of BASE, and bits of quantised weights.
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
    "starcoder2": ("starcoder2", GROUPED | TIED | {"norm_epsilon": 1e-5}, None),
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
#: A checkpoint may hold more than is loaded: this the families above drop.
DROPPED = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.ones(16)}


def write(folder, name):
    """The folder, with random weights."""
    model_type, changes, bits = MODELS[name]
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
    return folder


def token_bytes(name, element_bytes, scale_bytes=0):
    """K and V of a token in all layers, by hand."""
    config = BASE | MODELS[name][1]
    row = config["head_dim"] * element_bytes + scale_bytes
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * row


def settings(folder, dtype, **changes):
    """vLLM's configuration, and where the loader finds the model."""
    content = json.loads((folder / "config.json").read_text())
    options = {
        "model_type": content["model_type"],
        "dtype": dtype,
        "cache_dtype": "auto",
        "block_size": 16,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    }
    config = engine.config(**(options | changes))
    config.model_config.model = str(folder)
    config.model_config.revision = None
    config.model_config.trust_remote_code = False
    config.model_config.hf_overrides = {}
    object.__setattr__(config, "load_config", SimpleNamespace(download_dir=None))
    return config


def read(folder, dtype):
    content = json.loads((folder / "config.json").read_text())
    return Model.read(folder, content["model_type"], dtype)
