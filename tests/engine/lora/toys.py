# SPDX-License-Identifier: Apache-2.0
"""Small random transformers models, and PEFT adapters for them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from own_configs import own_config
from transformers import AutoModelForCausalLM

VOCAB = 256
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": {"model_type": "llama"},
    "qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": True} | _EXPERTS,
    # One attention layer per three recurrent ones.
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    # An untied head, which mlx-lm's model drops if it finds no weights for it.
    "gemma3": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "query_pre_attn_scalar": 16,
    },
    # mlx-lm folds these factors into the weights.
    "falcon_h1": {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mlp_multipliers": [0.5, 2.0],
        "ssm_multipliers": [0.3, 1.5, 0.7, 2.0, 0.9],
        "attention_in_multiplier": 0.6,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.4,
        "ssm_in_multiplier": 1.25,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
    },
    # Forget gate and experts have other names in files than in transformers' class.
    "kimi_linear": {
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["sparse", "sparse"],
        "pad_token_id": 0,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
}


def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Generates with transformers."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([list(prompt)]),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


@dataclass(frozen=True)
class Toy:
    """A model of one of `CONFIGS`, saved in a folder."""

    kind: str
    folder: Path

    @cached_property
    def model(self) -> Any:
        torch.manual_seed(0)
        config = dict(_COMMON) | CONFIGS[self.kind]
        if self.kind == "gpt2":
            config = {"vocab_size": VOCAB} | CONFIGS[self.kind]
        if self.kind == "nemotron_h":
            del config["num_hidden_layers"]  # implied by layers_block_type
        model = AutoModelForCausalLM.from_config(own_config(**config)).float().eval()
        with torch.no_grad():  # logits that differ by more than rounding
            for name, weight in model.named_parameters():
                if weight.ndim >= 2 and "conv1d" not in name:
                    weight.normal_(std=0.15)
        return model

    def save(self) -> str:
        """Saves the model; returns its folder."""
        self.model.save_pretrained(self.folder)
        return str(self.folder)

    def adapter(self, folder: Path, seed: int, **config: Any) -> Any:
        """Writes an adapter with random weights; returns PEFT's model with it."""
        return adapter_of(self.model, folder, seed, **config)


def adapter_of(model: Any, folder: Path, seed: int, **config: Any) -> Any:
    """Writes an adapter of `model` with random weights; returns PEFT's model with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | config
    if "target_parameters" in config and "target_modules" not in config:
        settings["target_modules"] = []
    lora = LoraConfig(init_lora_weights=False, **settings)
    adapted = get_peft_model(copy.deepcopy(model), lora).eval()
    adapted.save_pretrained(folder)
    return adapted
