# SPDX-License-Identifier: Apache-2.0
"""Runs engines with a disk prefix cache, and inspects their answers and files."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.harness import counters, engine, free_blocks, greedy, run_out
from vllm import LLM, TokensPrompt

from vllm_metal.kv_transfer.disk.layout import LEDGER

LIMIT = 1 << 30  # bytes, more than any test writes
HITS, QUERIES = "vllm:external_prefix_cache_hits", "vllm:external_prefix_cache_queries"
LOCAL_HITS = "vllm:prefix_cache_hits"
LOADED, STORED = "vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"
#: Maximum difference of two log-probabilities of one text: chunks of other lengths sum in another
#: order, see `e2e.harness.TIE`.
LOGPROB_TIE = 1e-3


@contextmanager
def disk_engine(
    model: str, folder: Path, max_bytes: int = LIMIT, salt_key: Path | None = None, **options: Any
) -> Iterator[LLM]:
    """Runs an engine with its prefix cache in `folder`; all blocks are free at its end."""
    config = {"prefix_cache_dir": str(folder), "prefix_cache_bytes": max_bytes}
    if salt_key is not None:
        config["prefix_cache_salt_key"] = str(salt_key)
    config |= options.pop("additional_config", {})
    settings: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 8 << 20}
    with engine(model, additional_config=config, **(settings | options)) as llm:
        free = free_blocks(llm)
        yield llm
        run_out(llm)
        assert free_blocks(llm) == free, "blocks were never freed"


@dataclass(frozen=True)
class Answer:
    """A request's answer. logprobs: of the chosen tokens."""

    tokens: list[int]
    logprobs: list[float]
    cached: int  # prompt tokens that were not computed

    def same_text(self, other: Answer) -> bool:
        return self.tokens == other.tokens and self.logprobs == pytest.approx(
            other.logprobs, abs=LOGPROB_TIE
        )


def ask(
    llm: LLM, prompts: Sequence[list[int]], max_tokens: int = 8, salt: str | None = None
) -> list[Answer]:
    """Sends prompts at once; returns their greedy answers. None may fail."""
    inputs = [
        TokensPrompt(prompt_token_ids=prompt, **({"cache_salt": salt} if salt else {}))
        for prompt in prompts
    ]
    answers = []
    for output in llm.generate(inputs, greedy(max_tokens, logprobs=0), use_tqdm=False):
        completion = output.outputs[0]
        assert completion.finish_reason == "length", completion.stop_reason
        tokens = list(completion.token_ids)
        logprobs = [
            place[token].logprob for place, token in zip(completion.logprobs, tokens, strict=True)
        ]
        answers.append(Answer(tokens, logprobs, output.num_cached_tokens))
    return answers


def check_same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Asserts that texts are equal, whatever was cached."""
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.tokens == other.tokens, index
        assert one.same_text(other), (index, one.logprobs, other.logprobs)


def random_prompts(lengths: Sequence[int], vocab: int, seed: int = 1) -> list[list[int]]:
    """Makes prompts whose first blocks all differ."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, length).tolist() for length in lengths]


def pages(folder: Path, namespace: str = "*") -> list[Path]:
    """Returns the block files on disk, of one namespace or all."""
    found = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    return sorted(
        path for path in found if path.suffix == ".kv" and path.match(f"{namespace}/*/*.kv")
    )


def bytes_on_disk(folder: Path) -> int:
    """Returns the size of a folder's files, rounded up to 4 KiB each, without hidden files."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += -(-os.stat(os.path.join(parent, name)).st_size // 4096) * 4096
    return total


def disk_hits(llm: LLM) -> float:
    """Returns the prompt tokens loaded from disk so far."""
    return counters(llm).get(HITS, 0)


class Watch:
    """Measures a folder continuously in a thread. peak: most bytes seen.

    It takes the lock under which engines make room; otherwise it could see an evicted file
    together with its replacement.
    """

    def __init__(self, folder: Path) -> None:
        self.peak = 0
        self._folder = folder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._ended.wait(0.02):
            with suppress(FileNotFoundError), (self._folder / LEDGER).open() as ledger:
                fcntl.flock(ledger, fcntl.LOCK_EX)
                self.peak = max(self.peak, bytes_on_disk(self._folder))
