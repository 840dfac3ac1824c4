# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers' with random weights, and adapters of PEFT's for them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    # Three layers with a recurrent state to one with attention.
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
    # With a head of its own, which mlx-lm's model drops if it sees no weights of it.
    "gemma3": {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "query_pre_attn_scalar": 16,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
}


def greedy_tokens(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates."""
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
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
        with torch.no_grad():  # logits that differ by more than rounding
            for name, weight in model.named_parameters():
                if weight.ndim >= 2 and "conv1d" not in name:
                    weight.normal_(std=0.15)
        return model

    def save(self) -> str:
        """The folder, with the model in it."""
        self.model.save_pretrained(self.folder)
        return str(self.folder)

    def adapter(self, folder: Path, seed: int, **config: Any) -> Any:
        """Writes an adapter with random weights, and returns PEFT's model with it."""
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | config
        if "target_parameters" in config and "target_modules" not in config:
            settings["target_modules"] = []
        adapted = get_peft_model(
            copy.deepcopy(self.model), LoraConfig(init_lora_weights=False, **settings)
        ).eval()
        adapted.save_pretrained(folder)
        return adapted
