# SPDX-License-Identifier: Apache-2.0
"""Writes a model of chosen size with random weights and a word tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCABULARY = 512


@dataclass(frozen=True)
class Toy:
    """A llama with 16-bit weights."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    longest: int = 2048  # tokens

    @property
    def token_bytes(self) -> int:
        """K/V bytes per token."""
        return 2 * 2 * self.layers * self.kv_heads * self.hidden // self.heads

    def write(self, folder: Path) -> str:
        """Writes the model into a new folder; returns its path."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.longest,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "eos_token_id": 0,
            "bos_token_id": 1,
            "dtype": "bfloat16",
        }
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        mx.random.seed(0)
        model = llama.Model(llama.ModelArgs.from_dict(config))
        model.set_dtype(mx.bfloat16)
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
        words = {f"t{token}": token for token in range(VOCABULARY)}
        tokenizer = Tokenizer(WordLevel(words, "t0"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t0", "unk_token": "t0"}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind))
        return str(folder)
