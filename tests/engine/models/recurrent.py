# SPDX-License-Identifier: Apache-2.0
"""Small models of the families with recurrent or convolution states."""

import importlib
import json
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from vllm_metal.patches.mlx_patches import registry, seam
from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS

VOCAB = 64


@dataclass(frozen=True)
class Family:
    """A family of mlx-lm or mlx-vlm, and a small model of it."""

    module: str  # in mlx_lm.models; a model_type if mlx-vlm has the module
    architecture: str  # in config.json
    config: dict[str, Any]


_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
#: The subset that vLLM reads.
_UNREAD = ("bos_token_id", "eos_token_id", "max_position_embeddings", "torch_dtype")
_TEXT_OF = {"qwen3_5_moe": "qwen3_5"}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 4,
}
MAMBA = {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_proj_bias": False, "mamba_conv_bias": True}

FAMILIES = {
    # Gated delta rule, and attention.
    "qwen3_next": Family("qwen3_next", "Qwen3NextForCausalLM", DELTA | MOE),
    # States so large that a block holds five parts of 16 tokens.
    "qwen3_next, large states": Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        DELTA | MOE | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    ),
    # Mamba 2 and attention in parallel in each layer.
    "falcon_h1": Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        MAMBA
        | {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": False,
            "mlp_bias": False,
            "projectors_bias": False,
            "mamba_d_head": 8,
            "mamba_d_ssm": 32,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_n_heads": 4,
            "mamba_chunk_size": 16,
            "mamba_norm_before_gate": False,
            "mamba_rms_norm": False,
            "mamba_use_mlp": True,
        },
    ),
    # Mamba 1, and attention.
    "jamba": Family(
        "jamba",
        "JambaForCausalLM",
        MAMBA
        | {
            "num_hidden_layers": 4,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # Short convolutions, and attention.
    "lfm2": Family(
        "lfm2",
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1, 3],
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        },
    ),
    # A linear recurrence, and windows.
    "recurrent_gemma": Family(
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "intermediate_size": 192,
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": 24,
            "lru_width": 64,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
    # Mamba 2 only.
    "mamba2": Family(
        "mamba2",
        "Mamba2ForCausalLM",
        {
            "num_hidden_layers": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.0, 100.0],
            "time_step_rank": 2,
            "expand": 2,
            "chunk_size": 16,
        },
    ),
}


def config_of(family: Family) -> dict[str, Any]:
    """Returns config.json of the family's small model."""
    head = {"model_type": family.module, "architectures": [family.architecture]}
    read = _named(family.module)
    common = {key: value for key, value in _COMMON.items() if key in read or key in _UNREAD}
    if "text_config" in family.config:
        if "hidden_size" not in read:  # another module reads the text model
            common = _COMMON
        return head | family.config | {"text_config": common | family.config["text_config"]}
    return head | common | family.config


def _named(module: str) -> set[str]:
    """Returns the keys read by the module, or by the one that provides its text model."""
    if module in MLX_VLM_MODELS:
        _, arguments = registry.classes({"model_type": module})
        content = vars(sys.modules[arguments.__module__])
    else:
        content = vars(importlib.import_module(f"mlx_lm.models.{_TEXT_OF.get(module, module)}"))
    arguments = [each for each in content.values() if isinstance(each, type) and is_dataclass(each)]
    return {field.name for each in arguments for field in fields(each)}


def make_model(family: Family, seed: int = 1, drawn: bool = False) -> Any:
    """Makes the small model with random weights.

    Args:
        family: the family.
        seed: seed of the weights.
        drawn: use weights large enough that texts vary, including biases and norms.
    """
    config = config_of(family)
    if family.module in MLX_VLM_MODELS:
        model_class, arguments = registry.classes(config)
    else:
        module = importlib.import_module(f"mlx_lm.models.{family.module}")
        seam.install()
        registry.install()
        model_class, arguments = module.Model, module.ModelArgs
    mx.random.seed(seed)
    model = model_class(arguments.from_dict(config))
    if drawn:
        draw(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def draw(model: Any) -> None:
    """Draws parameters; those that a recurrence's stability depends on vary only a little."""
    found = []
    for name, array in tree_flatten(model.parameters()):
        if array.dtype in (mx.uint8, mx.uint32):  # packed weights
            bits = mx.random.randint(0, 256, (*array.shape[:-1], array.shape[-1] * array.itemsize))
            found.append((name, bits.astype(mx.uint8).view(array.dtype)))
        if array.dtype == mx.int32:  # indices of a product's inputs
            found.append((name, mx.random.randint(0, array.shape[-1], array.shape)))
        if not mx.issubdtype(array.dtype, mx.floating) or (array.ndim == 0 and array.item()):
            continue
        drawn = mx.random.normal(array.shape).astype(array.dtype)
        last = name.rpartition(".")[2]
        if last in ("A_log", "D", "dt_bias") or (array.ndim == 1 and last == "weight"):
            drawn = array + 0.2 * drawn
        elif array.ndim == 0:  # a scale, which would be zero
            drawn = 0.7 + 0.2 * drawn
        elif array.ndim >= 2:
            inputs = array.shape[-1] if array.shape[-1] > 1 else array[0].size
            of_tokens = "embed" in name or ".wte" in name
            drawn = drawn * (0.5 if of_tokens else 1.6 / inputs**0.5)
        else:
            drawn = 0.2 * drawn
        found.append((name, drawn))
    model.update(tree_unflatten(found))


def write_model(family: Family, folder: Path, seed: int = 1, drawn: bool = False) -> str:
    """Writes the small model as a folder that vLLM and mlx-lm can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(family)))
    weights = dict(tree_flatten(make_model(family, seed, drawn).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return str(folder)
