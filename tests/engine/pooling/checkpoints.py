# SPDX-License-Identifier: Apache-2.0
"""Toy checkpoints of embedders and rerankers: random weights, a real tokenizer, as transformers and
sentence-transformers write them."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from vllm_metal.engine.models.embedded import embedded_model_path

#: Tokenizer files.
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "chat_template")
HIDDEN = 64


def qwen3(folder: Path, tied: bool = True, seed: int = 0, **changes: Any) -> str:
    """Writes a two-layer Qwen3 with the tokenizer of the embedded SmolLM2."""
    folder.mkdir(parents=True)
    source = Path(embedded_model_path(dequantize=True))
    for path in source.iterdir():
        if path.name.startswith(_TOKENIZER):
            os.symlink(path, folder / path.name)
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(AutoTokenizer.from_pretrained(source)),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "initializer_range": 0.2,  # so that texts differ, and adjacent tokens matter
    }
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**settings | changes)).save_pretrained(folder)
    return str(folder)


def as_decoder_alone(folder: str) -> None:
    """Renames the arrays as published for Qwen3-Embedding: without the prefix "model"."""
    path = Path(folder) / "model.safetensors"
    arrays = {
        name.removeprefix("model."): array
        for name, array in load_file(path).items()
        if name.startswith("model.")
    }
    save_file(arrays, path, {"format": "pt"})


def as_sentence_transformer(
    folder: str, pooling: str = "lasttoken", normalize: bool = True, dense: int | None = None
) -> None:
    """Adds files of sentence-transformers: pooling, a Dense layer with `dense` outputs, a norm."""
    root = Path(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    mode = {"lasttoken": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}[pooling]
    _write(
        root / "1_Pooling/config.json",
        {"word_embedding_dimension": HIDDEN, f"pooling_mode_{mode}": True},
    )
    if dense is not None:
        modules.append(("2_Dense", "Dense"))
        activation = "torch.nn.modules.activation.Tanh"
        sizes = {"in_features": HIDDEN, "out_features": dense, "bias": True}
        _write(root / "2_Dense/config.json", sizes | {"activation_function": activation})
        layer = torch.nn.Linear(HIDDEN, dense)
        arrays = {f"linear.{name}": array.data for name, array in layer.named_parameters()}
        save_file(arrays, root / "2_Dense/model.safetensors")
    if normalize:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(modules)
    ]
    _write(root / "modules.json", listed)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
