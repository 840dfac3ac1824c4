# SPDX-License-Identifier: Apache-2.0
"""Measures perplexity and greedy agreement of quantized KV caches.

Feeds windows of English text through the engine, whose prompt logprobs give each token's
likelihood; most of a window's context comes from the cache. The text is Python's language reference
from `pydoc_data.topics`. Prints a table, writes JSON:
`python benchmarks/cache_quality.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

import numpy as np
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from vllm_metal.engine.models.embedded import embedded_model_path, gemma3_270m_path

ROOT = Path(__file__).parents[1]
CACHES = ("auto", "fp8", "int8")
WINDOW = 1024  # tokens of a request
CHUNK = 256  # tokens per step: three quarters of a window's context are then cached
POOL = 256 << 20


@dataclass(frozen=True)
class Result:
    """Results of one model and cache."""

    model: str
    cache: str
    bytes_per_token: int  # of the cache
    tokens: int  # predicted
    perplexity: float
    relative: float  # increase over the unquantized cache
    same_top_token: float  # share of positions with the same most likely next token


@dataclass(frozen=True)
class Reading:
    """A model's predictions for the text."""

    bytes_per_token: int
    logprobs: np.ndarray  # [N] of the text's tokens
    top_ids: np.ndarray  # [N] most likely tokens at the same positions


def windows(model: str, num_windows: int) -> list[list[int]]:
    """Splits the text into pieces of WINDOW tokens, each after the model's usual prefix."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer(text[: num_windows * WINDOW * 8], add_special_tokens=False)["input_ids"]
    beginning = tokenizer("")["input_ids"]
    size = WINDOW - len(beginning)
    return [beginning + tokens[n * size : (n + 1) * size] for n in range(num_windows)]


def read(model: str, prompts: Sequence[list[int]], cache: str) -> Reading:
    llm = LLM(
        model,
        kv_cache_dtype=cache,
        kv_cache_memory_bytes=POOL,
        max_model_len=WINDOW + 1,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=1,
        enable_prefix_caching=False,
        seed=0,
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        logprobs, top_ids = [], []
        for output in llm.generate(inputs, params, use_tqdm=False):
            pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            for token, entries in list(pairs)[1:]:  # the first token has no prediction
                logprobs.append(entries[token].logprob)
                top_ids.append(next(id for id, entry in entries.items() if entry.rank == 1))
        (specs,) = llm.llm_engine.collective_rpc("get_kv_cache_spec")
        size = sum(spec.page_size_bytes // spec.block_size for spec in specs.values())
        return Reading(size, np.array(logprobs), np.array(top_ids))
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def compare(model: str, prompts: Sequence[list[int]], caches: Sequence[str]) -> list[Result]:
    """Compares all caches with the first."""
    name, results = Path(model).name, []
    plain = None
    for cache in caches:
        reading = read(model, prompts, cache)
        plain = plain or reading
        difference = float((plain.logprobs - reading.logprobs).mean())
        results.append(
            Result(
                model=name,
                cache=cache,
                bytes_per_token=reading.bytes_per_token,
                tokens=len(reading.logprobs),
                perplexity=math.exp(-float(reading.logprobs.mean())),
                relative=math.expm1(difference),
                same_top_token=float((reading.top_ids == plain.top_ids).mean()),
            )
        )
        row = results[-1]
        print(
            f"| {row.model} | {row.cache} | {row.bytes_per_token} | {row.perplexity:.3f} "
            f"| {row.relative:+.2%} | {row.same_top_token:.1%} |",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="default: the two embedded ones")
    parser.add_argument("--caches", nargs="+", default=CACHES, metavar="DTYPE")
    parser.add_argument("--windows", type=int, help=f"of {WINDOW} tokens; default: 9, quick: 2")
    parser.add_argument("--quick", action="store_true", help="less text")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    models = args.model or [str(embedded_model_path(dequantize=True)), str(gemma3_270m_path())]
    num_windows = args.windows or (2 if args.quick else 9)
    print("| model | cache | bytes a token | perplexity | against the first | same top token |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    results: list[Result] = []
    for model in models:
        results += compare(model, windows(model, num_windows), args.caches)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        "text": f"Python {sys.version_info.major}.{sys.version_info.minor} language reference",
        "window": WINDOW,
        "results": [asdict(result) for result in results],
    }
    target = args.out / "cache_quality.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    print(f"wrote {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
