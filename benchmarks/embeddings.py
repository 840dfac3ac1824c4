# SPDX-License-Identifier: Apache-2.0
"""Compares an encoder's texts per second with sentence-transformers'.

    VLLM_METAL_DEVICE=cpu OMP_NUM_THREADS=1 python benchmarks/embeddings.py MODEL

Both get the same texts in turn in one process; the best turn of each counts. sentence-transformers
sorts by length and pads to the longest of a batch. The engine's overhead is the time of `LLM.embed`
beyond the forward passes of the same steps.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

import numpy as np

_SOURCE = Path(__file__).parents[1] / "docs" / "performance.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a sentence-transformers model")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--words", type=int, default=100, help="words of the longest text")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    import torch
    from sentence_transformers import SentenceTransformer
    from vllm import LLM

    texts = make_texts(args.texts, args.words)
    reference = SentenceTransformer(args.model, device="cpu")
    llm = LLM(args.model)
    prompts = [{"prompt_token_ids": ids} for ids in reference.tokenizer(texts)["input_ids"]]
    lengths = [len(prompt["prompt_token_ids"]) for prompt in prompts]
    ways: dict[str, Callable[[], Any]] = {
        "sentence-transformers": lambda: reference.encode(texts, batch_size=32),
        "this engine": lambda: vectors(llm.embed(texts, use_tqdm=False)),
        "this engine, of tokens": lambda: vectors(llm.embed(prompts, use_tqdm=False)),
        "its forward passes alone": forward_passes(llm, prompts),
    }
    found = {name: way() for name, way in ways.items()}  # warm-up
    cosines = (found["sentence-transformers"] * found["this engine"]).sum(-1)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(args.turns):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - begin)
    print(f"{args.texts} texts of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all")
    print(
        f"torch with {torch.get_num_threads()} thread(s); the least cosine is {cosines.min():.6f}"
    )
    for name, seconds in best.items():
        print(
            f"{name:28}{args.texts / seconds:9.1f} texts/s{sum(lengths) / seconds:10.0f} tokens/s"
        )
    ratio = best["sentence-transformers"] / best["this engine"]
    own = 1 - best["its forward passes alone"] / best["this engine, of tokens"]
    print(f"this engine / sentence-transformers: {ratio:.2f}; the engine's own share: {own:.0%}")


def make_texts(count: int, longest: int) -> list[str]:
    """Returns English texts of 1 to `longest` words in random order, mostly short."""
    words, rng = _SOURCE.read_text().split(), np.random.default_rng(0)
    lengths = rng.permutation(np.geomspace(1, longest, count).round().astype(int))
    starts = rng.integers(0, len(words) - longest, count)
    return [" ".join(words[s : s + n]) for s, n in zip(starts, lengths, strict=True)]


def vectors(outputs: list[Any]) -> np.ndarray:
    """Returns the outputs as [n, H]."""
    return np.array([output.outputs.embedding for output in outputs])


def forward_passes(llm: Any, prompts: list[dict[str, list[int]]]) -> Callable[[], None]:
    """Returns a function that runs the forward passes of the engine's steps for the prompts."""
    import mlx.core as mx

    from vllm_metal.engine.pooling.encoders.executor import EncoderExecutor
    from vllm_metal.engine.pooling.encoders.loading import lazy_encoder
    from vllm_metal.engine.pooling.encoders.profile import rows_of
    from vllm_metal.engine.pooling.encoders.served import ARCHITECTURES

    config = llm.llm_engine.vllm_config
    served = ARCHITECTURES[config.model_config.architecture]
    encoder, _ = lazy_encoder(Path(config.model_config.model), served, mx.float32)
    executor = EncoderExecutor(encoder, config.cache_config.block_size)
    most, steps = config.scheduler_config.max_num_batched_tokens, [[]]
    for prompt in prompts:
        ids = prompt["prompt_token_ids"]
        if sum(map(len, steps[-1])) + len(ids) > most:
            steps.append([])
        steps[-1].append(ids)
    rows = [
        rows_of([len(ids) for ids in step], np.concatenate(step, dtype=np.int32)) for step in steps
    ]

    def run() -> None:
        for each in rows:
            mx.eval(executor.forward_hidden(each, None))

    return run


if __name__ == "__main__":
    main()
