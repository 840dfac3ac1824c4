# SPDX-License-Identifier: Apache-2.0
"""Writes a hub cache with the models of vLLM's tests, so that they need no network.

Configurations have the published dimensions. Where a test generates text with any model, it
gets a small random one of the same family. All have SmolLM2's tokenizer.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils.logging import disable_progress_bar

from vllm_metal.engine.models.embedded import embedded_model_path

_REVISION = "0" * 40  # a snapshot's commit; any 40 hex digits work
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def _opt_125m() -> OPTConfig:
    # The class's defaults are this model. Without a dtype, vLLM would ask the hub for the weights'.
    return OPTConfig(architectures=["OPTForCausalLM"], dtype="float16")


def _opt_350m() -> OPTConfig:
    return OPTConfig(
        architectures=["OPTForCausalLM"],
        dtype="float16",
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        ffn_dim=4096,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    )


def _qwen15_7b() -> Qwen2Config:
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=32768,
    )


_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def _small_llama(**vocabulary: int) -> LlamaConfig:
    return LlamaConfig(**vocabulary, **_SMALL, max_position_embeddings=8192)


def _small_qwen3(**vocabulary: int) -> Qwen3Config:
    return Qwen3Config(**vocabulary, **_SMALL, head_dim=32, max_position_embeddings=40960)


def _small_gpt2(**vocabulary: int) -> GPT2Config:
    return GPT2Config(**vocabulary, n_embd=64, n_layer=2, n_head=4, n_ctx=1024)


CONFIGURATIONS: dict[str, Callable[[], PretrainedConfig]] = {
    "facebook/opt-125m": _opt_125m,
    "facebook/opt-350m": _opt_350m,
    "Qwen/Qwen1.5-7B": _qwen15_7b,
}
SMALL_MODELS: dict[str, Callable[..., PretrainedConfig]] = {
    "hmellor/tiny-random-LlamaForCausalLM": _small_llama,
    "meta-llama/Llama-3.2-1B": _small_llama,
    "meta-llama/Llama-3.2-1B-Instruct": _small_llama,
    "Qwen/Qwen3-0.6B": _small_qwen3,
    "distilbert/distilgpt2": _small_gpt2,
    "openai-community/gpt2": _small_gpt2,
    "gpt2": _small_gpt2,
}


def write(home: Path) -> None:
    """Writes the models above into ``home``, a folder for ``HF_HOME``."""
    disable_progress_bar()
    source = Path(embedded_model_path())
    for name, configuration in CONFIGURATIONS.items():
        folder = _snapshot(home, name)
        configuration().save_pretrained(folder)
        _copy_tokenizer(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    vocabulary = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    for name, configuration in SMALL_MODELS.items():
        folder = _snapshot(home, name)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(configuration(**vocabulary))
        # GPT-2's published weights lack the prefix, which mlx-lm relies on.
        weights = {key.removeprefix("transformer."): w for key, w in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=weights)
        _copy_tokenizer(source, folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for file in _TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copy(source / file, folder)


def _snapshot(home: Path, name: str) -> Path:
    """Returns the folder where huggingface_hub looks for a model's files."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(_REVISION)
    folder = model / "snapshots" / _REVISION
    folder.mkdir(parents=True)
    return folder
