# SPDX-License-Identifier: Apache-2.0
"""Heads for a real model that are right at times, without training.

Where a head is linear in what it reads, the best one is a least-squares fit of the model's own next
hidden state, over real text. The rest of each head is set so that it is linear: layers that add
nothing, and for EAGLE-3 attention that sees the own row only.
"""

import json
from functools import cache, cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_attention_mask
from mlx_lm.utils import load_model

CHUNK = 64  # tokens seen as one text: many are near a start, as in short prompts
RIDGE = 1e-2  # of the mean square input: for a few thousand tokens and some thousand unknowns
NUM_HEADS = 7  # of Medusa's


class FittedHeads:
    """Checkpoints of heads, each fitted at first use."""

    def __init__(self, model: str, tokens: list[int], folder: Path) -> None:
        """
        Args:
            model: folder of a Llama of mlx-lm's with tied embeddings.
            tokens: real text.
            folder: folder for the checkpoints.
        """
        self._tokens = tokens
        self._folder = folder
        self._model, config = load_model(Path(model))
        self._config = {
            key: config[key]
            for key in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
        } | {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "intermediate_size": 32}
        self._size = config["hidden_size"]
        self._head_size = self._size // config["num_attention_heads"]
        count = len(self._model.layers)
        self._taps = (2, count // 2, count - 3)  # EAGLE-3's unless a head says otherwise
        self.speculation = cache(self._speculation)

    def _speculation(self, method: str) -> dict[str, object]:
        """Returns a method's --speculative-config without the number of drafts."""
        weights, config = {"eagle": self._eagle, "eagle3": self._eagle3, "medusa": self._medusa}[
            method
        ]()
        folder = self._folder / method
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        arrays = {name: mx.array(array.astype(np.float32)) for name, array in weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
        return {"method": method, "model": str(folder)}

    @cached_property
    def _states(self) -> dict[str, np.ndarray]:
        """Returns the outputs of the relevant layers, [texts, CHUNK, H]."""
        inner = self._model.model
        whole = len(self._tokens) // CHUNK * CHUNK
        hidden = embeds = inner.embed_tokens(mx.array(self._tokens[:whole]).reshape(-1, CHUNK))
        mask = create_attention_mask(hidden, None)
        found = {"embeds": embeds}
        for number, layer in enumerate(inner.layers, 1):
            hidden = layer(hidden, mask)
            if number in self._taps:
                found[f"layer {number}"] = hidden
        found |= {"last": hidden, "final": inner.norm(hidden)}
        mx.eval(found)
        return {name: np.array(states) for name, states in found.items()}

    def _rows(self, name: str, skip: int, ahead: int) -> np.ndarray:
        """Returns [T, H]: each text's rows without the first `skip` and the last `ahead`."""
        return self._states[name][:, skip : CHUNK - ahead].reshape(-1, self._size)

    def _eagle(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """Makes `fc` the fit, which the decoder layer passes on."""
        inputs = np.concatenate([self._rows("embeds", 1, 0), self._rows("final", 0, 1)], axis=1)
        weights = self._layer("layers.0", self._size)
        weights["fc.weight"] = _fit(inputs, self._rows("final", 1, 0)).T
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return weights, self._config | config | {"num_hidden_layers": 1}

    def _eagle3(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """`fc` tells the last state from those of three layers, and attention adds the step to the
        next one: its values are the fit, as many columns of it as K/V have."""
        taps = np.concatenate([self._rows(f"layer {tap}", 0, 1) for tap in self._taps], axis=1)
        last = _normed(self._rows("last", 0, 1))
        combine = _fit(taps, last)
        here = _normed(taps @ combine)
        inputs = np.concatenate([_normed(self._rows("embeds", 1, 0)), here], axis=1)
        step = _fit(inputs, _normed(self._rows("last", 1, 0)) - here)
        num_values = self._config["num_key_value_heads"] * self._head_size
        fitted = inputs @ step
        basis = np.linalg.eigh(fitted.T @ fitted)[1][:, -num_values:]  # where it varies most
        weights = self._layer("midlayer", 2 * self._size)
        weights["fc.weight"] = combine.T
        weights["midlayer.self_attn.v_proj.weight"] = (step @ basis).T
        # One of the query heads that share K/V brings its values, the others nothing.
        shared = self._config["num_attention_heads"] // self._config["num_key_value_heads"]
        out = np.zeros((self._size, self._size // self._head_size, self._head_size))
        out[:, ::shared] = basis.reshape(self._size, -1, self._head_size)
        weights["midlayer.self_attn.o_proj.weight"] = out.reshape(self._size, -1)
        # Queries and keys are all the same before they turn with the position, so the score is
        # highest where a row meets itself: by more than 30 from the next row on, at this length.
        turned = np.tile(np.repeat([16.0, 0.0], self._head_size // 2), self._size)
        for kind, width in (("q", self._size), ("k", num_values), ("v", num_values)):
            bias = turned[:width] if kind != "v" else np.zeros(width)
            weights[f"midlayer.self_attn.{kind}_proj.bias"] = bias
        weights["midlayer.self_attn.o_proj.bias"] = np.zeros(self._size)
        for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm"):
            weights[f"{norm}.weight"] = np.ones(self._size)
        weights["norm.weight"] = np.array(self._model.model.norm.weight)
        config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
        config |= {"num_hidden_layers": 1, "attention_bias": True, "norm_before_residual": True}
        return weights, self._config | config | {"rope_theta": 10000.0}

    def _medusa(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        """The residual blocks add nothing; a projection is the fit and the model's own, of the
        tokens that the model holds likely somewhere in the text."""
        embedding = np.array(self._model.model.embed_tokens.weight)
        likely = mx.argmax(
            self._model.model.embed_tokens.as_linear(mx.array(self._rows("final", 0, 0))), axis=-1
        )
        frequent = np.unique(np.array(likely))
        weights = {"token_map": frequent}
        for head in range(NUM_HEADS):
            step = _fit(self._rows("final", 0, head + 1), self._rows("final", head + 1, 0))
            weights[f"blocks.{head}.layers.0.weight"] = np.zeros((self._size, self._size))
            weights[f"lm_heads.{head}.weight"] = embedding[frequent] @ step.T
        config = {"model_type": "medusa", "num_heads": NUM_HEADS, "num_hidden_layers": 1}
        sizes = {key: self._config[key] for key in ("hidden_size", "vocab_size")}
        return weights, config | sizes | {"truncated_vocab_size": len(frequent)}

    def _layer(self, name: str, width: int) -> dict[str, np.ndarray]:
        """Returns a decoder layer that adds nothing, and whose attention reads rows of `width`."""
        size = self._size
        num_values = self._config["num_key_value_heads"] * self._head_size
        shapes = {
            "self_attn.q_proj": (size, width),
            "self_attn.k_proj": (num_values, width),
            "self_attn.v_proj": (num_values, width),
            "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (self._config["intermediate_size"], size),
            "mlp.up_proj": (self._config["intermediate_size"], size),
            "mlp.down_proj": (size, self._config["intermediate_size"]),
            "post_attention_layernorm": (size,),
        }
        return {f"{name}.{part}.weight": np.zeros(shape) for part, shape in shapes.items()}


def _fit(inputs: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the [I, O] ridge regression that minimizes |inputs @ it - wanted|."""
    gram = inputs.T @ inputs
    gram += RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram), dtype=gram.dtype)
    return np.linalg.solve(gram, inputs.T @ wanted)


def _normed(states: np.ndarray) -> np.ndarray:
    return states / np.sqrt(np.square(states).mean(axis=-1, keepdims=True) + 1e-5)
