# SPDX-License-Identifier: Apache-2.0
"""Measures how logits change when the same tokens are computed in other shapes, on the CPU.

A model generates texts greedily, one at a time. Then it reads each in one forward pass, in chunks,
token by token, and in a batch: mathematically equivalent. Prints, per dtype and shape, the logit
differences, how often the likeliest token changes, and the gaps between the two likeliest tokens:
`python benchmarks/rounding.py`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

os.environ["VLLM_METAL_DEVICE"] = "cpu"

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

import mlx.core as mx
import numpy as np
from _shared import note, table
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.models.embedded import embedded_model_path

PROMPTS = (
    "The history of the printing press begins",
    "A recipe for bread needs flour, water and",
    "To sort a list of numbers, a program",
    "Once upon a time, in a village by the sea,",
)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
Read = Callable[[list[int]], mx.array]  # token ids [T] to logits [T, vocabulary], float32


class Reader:
    """Computes a text in different shapes with one model and dtype."""

    def __init__(self, model: object) -> None:
        self._model = model

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Returns the prompt and its greedy continuation."""
        cache, text, new = make_prompt_cache(self._model), list(prompt), prompt
        for _ in range(num_tokens):
            logits = self._model(mx.array([new]), cache=cache)[0, -1]
            new = [int(mx.argmax(logits).item())]
            text += new
        return text

    def in_chunks(self, size: int, copies: int = 1) -> Read:
        """Reads `size` tokens per forward pass, in a batch of `copies` texts of equal length."""

        def read(text: list[int]) -> mx.array:
            rows = [text, *(text[::-1] for _ in range(copies - 1))]
            cache, parts = make_prompt_cache(self._model), []
            for start in range(0, len(text), size):
                tokens = mx.array([row[start : start + size] for row in rows])
                parts.append(self._model(tokens, cache=cache)[0].astype(mx.float32))
                mx.eval(parts[-1])
            return mx.concatenate(parts)

        return read


def compare(reference: list[mx.array], found: list[mx.array]) -> tuple[float, float, str]:
    """Returns largest and median logit difference, and the positions with another top token."""
    gaps = np.concatenate(
        [np.array(mx.abs(one - other).max(-1)) for one, other in zip(reference, found, strict=True)]
    )
    flips = sum(
        int((mx.argmax(one, -1) != mx.argmax(other, -1)).sum().item())
        for one, other in zip(reference, found, strict=True)
    )
    return float(gaps.max()), float(np.median(gaps)), f"{flips} of {len(gaps)}"


def margins(reference: list[mx.array]) -> tuple[float, float, float]:
    """Returns the minimum, 1st percentile and median gap between the two likeliest tokens."""
    tops = np.concatenate([np.sort(np.array(each), -1)[:, -2:] for each in reference])
    gaps = tops[:, 1] - tops[:, 0]
    return float(gaps.min()), float(np.percentile(gaps, 1)), float(np.median(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated per prompt")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--model", type=Path, help="a folder; default: the embedded SmolLM2")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    closest = []
    for name in args.dtypes:
        model, tokenizer = load(str(args.model or embedded_model_path(dequantize=True)))
        model.set_dtype(DTYPES[name])
        reader = Reader(model)
        texts = [reader.greedy(tokenizer.encode(prompt), args.tokens) for prompt in PROMPTS]
        shapes = {
            "one token a forward": reader.in_chunks(1),
            "4 tokens a forward": reader.in_chunks(4),
            "32 tokens a forward": reader.in_chunks(32),
            "one forward, beside 3 texts": reader.in_chunks(1 << 20, copies=4),
            "one token a forward, beside 3 texts": reader.in_chunks(1, copies=4),
        }
        whole = [reader.in_chunks(1 << 20)(text) for text in texts]
        closest.append((name, *margins(whole)))
        rows = []
        for shape, read in shapes.items():
            rows.append((f"{name}, {shape}", *compare(whole, [read(text) for text in texts])))
            note(f"{name}, {shape}")
        table(("logits, against one forward", "largest", "median", "other top token"), rows)
    table(("gap of the two likeliest", "least", "1st percentile", "median"), closest)


if __name__ == "__main__":
    main()
