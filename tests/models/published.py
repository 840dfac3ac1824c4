# SPDX-License-Identifier: Apache-2.0
"""Small models as transformers writes them, and what transformers computes of them.

Shapes are odd: three query heads for each key head and, where the family can have it, a head size
that is not hidden size / heads. Weights are drawn so large that the most likely token varies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 99
_SMALL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_ROUTED = _EXPERTS | {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = _ROUTED | {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
}
_EVEN = {"head_dim": 8}  # hidden size / heads
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LINEAR = {"rope_type": "linear", "factor": 3.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@dataclass(frozen=True)
class Published:
    """A family's small model. shape: of its configuration; rope: changes of its parameters."""

    family: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    rope: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> PreTrainedModel:
        config = CONFIG_MAPPING[self.family](**(_SMALL | dict(self.shape)))
        if self.rope:
            config.rope_parameters = {"rope_theta": 10_000.0} | config.rope_parameters | self.rope
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return _drawn(model.float().eval())


def _drawn(model: PreTrainedModel) -> PreTrainedModel:
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.ndim > 1:
            parameter.data = noise * (1.6 / parameter.shape[-1] ** 0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.data = parameter.data + 0.2 * noise
        else:
            parameter.data = 0.3 * noise
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.data = 0.1 * torch.randn(buffer.shape, generator=random)
    return model


def log_probabilities(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """[B, T, V] float32 of [B, T] tokens."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor(tokens)).logits, -1).numpy()


def write(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


_PLAIN = [
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "glm",
    "glm4",
    "olmo2",
    "smollm3",
    "ernie4_5",
    "nemotron",
    "seed_oss",
]
_PLAIN_EVEN = [
    "qwen2",
    "cohere",
    "granite",
    "helium",
    "apertus",
    "hunyuan_v1_dense",
    "stablelm",
    "phi",
    "phi3",
]
CASES: dict[str, Published] = {
    **{family: Published(family) for family in _PLAIN},
    **{family: Published(family, _EVEN) for family in _PLAIN_EVEN},
    "olmo3": Published("olmo3", _WINDOWS),
    "cohere2": Published("cohere2", _WINDOWS | _EVEN),
    # mlx-lm scales embeddings by the root of this in bfloat16, transformers in the weights' dtype.
    "gemma3_text": Published("gemma3_text", _WINDOWS | {"hidden_size": 36}),
    "exaone4": Published("exaone4", _WINDOWS | _EVEN | {"sliding_window_pattern": 2}),
    "lfm2": Published("lfm2", _EVEN | {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "qwen3_moe": Published("qwen3_moe", _EXPERTS),
    **{f: Published(f, _EXPERTS | _EVEN) for f in ["mixtral", "qwen2_moe", "olmoe", "granitemoe"]},
    **{f: Published(f, _ROUTED) for f in ("glm4_moe", "dots1")},
    **{f: Published(f, _LATENT) for f in ("deepseek_v3", "glm4_moe_lite")},
}
_SCALED = [
    "llama",
    "qwen3",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v3",
    "cohere",
    "ernie4_5",
]
CASES |= {
    f"{name}, {rope['rope_type']}": Published(CASES[name].family, CASES[name].shape, rope)
    for name in _SCALED
    for rope in (_YARN, _LINEAR)
}
CASES["llama, llama3"] = Published("llama", {}, _LLAMA3)
CASES["qwen3_moe, llama3"] = Published("qwen3_moe", _EXPERTS, _LLAMA3)
