# SPDX-License-Identifier: Apache-2.0
"""Runs an engine under test, a reference for its tokens, and its counters."""

import contextlib
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from vllm import LLM, SamplingParams

from vllm_metal.engine.models.loader import dense_model

#: Largest gap between float32 logits that counts as a tie. Chunked, batched and one-at-a-time
#: matrix products sum in different orders; logits of these models (up to ~30) change by less
#: than 2e-4; see `Dense.check`, which reports the gaps.
TIE = 1e-3

_SOURCE = Path(__file__).parents[2] / "LICENSE"  # English text in every checkout


@contextlib.contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    """Runs an LLM with counters enabled; frees its memory afterwards."""
    settings = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 128 << 20,
        "disable_log_stats": False,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    llm = LLM(model, **(settings | options))
    # Like an engine's own process after its start, keep the decisions.
    llm.llm_engine.vllm_config.__post_init__()
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def compares_resident_memory() -> None:
    """Skips a test where RSS does not measure a process's memory."""
    if sys.platform != "linux":
        pytest.skip("MLX's own figures are right; macOS counts pages as resident that were freed")


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Returns parameters for greedy decoding of exactly `max_tokens`."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def counters(llm: LLM) -> dict[str, float]:
    """Returns vLLM's metrics: counters and gauges by name, histograms by sum, vectors by index."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "values"):
            found |= {f"{metric.name}:{place}": value for place, value in enumerate(metric.values)}
            continue
        value = metric.value if hasattr(metric, "value") else metric.sum
        found[metric.name] = found.get(metric.name, 0) + value
        if hasattr(metric, "count"):
            found[f"{metric.name}:count"] = metric.count
    return found


def free_blocks(llm: LLM) -> int:
    """Returns the number of blocks that no request holds."""
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def is_apart(llm: LLM) -> bool:
    """Returns whether the engine has its own process."""
    return not hasattr(llm.llm_engine.engine_core, "engine_core")


def run_out(llm: LLM) -> None:
    """Steps until the worker has no messages left, as an engine in its own process does."""
    if is_apart(llm):
        return
    core: Any = llm.llm_engine.engine_core.engine_core
    deadline = time.monotonic() + 240
    while core.scheduler.has_requests() or core.batch_queue:
        llm.llm_engine.step()
        assert time.monotonic() < deadline, "a transfer never ends"


def generate(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    """Generates token ids for each prompt."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def text_tokens(llm_or_path: str) -> list[int]:
    """Tokenizes real text with the model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(llm_or_path)(_SOURCE.read_text())["input_ids"]


def make_prompts(tokens: list[int], count: int, longest: int, seed: int = 5) -> list[list[int]]:
    """Makes prompts of 1 to `longest` tokens; about half share a prefix with others."""
    rng = np.random.default_rng(seed)
    lengths = np.unique(np.geomspace(1, longest, count * 2).astype(int))
    lengths = rng.permutation(np.resize(lengths, count))
    lengths[:2] = (1, longest)
    shared = [int(start) for start in rng.integers(0, len(tokens) - longest, 4)]
    prompts = []
    for index, length in enumerate(lengths):
        start = shared[index % 4] if index % 2 else int(rng.integers(0, len(tokens) - longest))
        prompts.append(tokens[start : start + int(length)])
    return prompts


@dataclass
class Dense:
    """mlx-lm's patched dense forward, one request at a time, to judge greedy tokens."""

    path: str
    tie: float = TIE
    ties: list[float] = field(default_factory=list)  # gaps that were accepted as ties

    def __post_init__(self) -> None:
        self.model = dense_model(Path(self.path))
        self._known: set[tuple[int, ...]] = set()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """[len(tokens), V] float32."""
        out = self.forward(mx.array([list(tokens)]))[0].astype(mx.float32)
        return np.array(out)

    def forward(self, tokens: mx.array) -> mx.array:
        """Returns [1, T, V] logits for [1, T] tokens."""
        return self.model(tokens)

    def check(self, prompt: list[int], generated: list[int]) -> None:
        """Asserts that each token is the argmax after its predecessors.

        By induction, that is greedy generation. If a token is not the argmax, its logit must be
        within `tie` of the largest; the check continues from the generated token.
        """
        key = (*prompt, -1, *generated)
        if key in self._known:
            return
        rows = self.logits([*prompt, *generated[:-1]])[len(prompt) - 1 :]
        for step, (row, token) in enumerate(zip(rows, generated, strict=True)):
            gap = float(row.max() - row[token])
            assert gap <= self.tie, (
                f"token {step} of a prompt of {len(prompt)}: {gap} below the best"
            )
            if gap:
                self.ties.append(gap)
        self._known.add(key)


def checked_passes(
    llm: LLM, dense: Dense, prompts: Sequence[list[int]], max_tokens: int, passes: int = 2
) -> list[dict[str, float]]:
    """Serves the prompts several times and checks every output; returns counters of each pass."""
    seen = []
    for _ in range(passes):
        outputs = generate(llm, prompts, greedy(max_tokens))
        for prompt, tokens in zip(prompts, outputs, strict=True):
            assert len(tokens) == max_tokens
            dense.check(prompt, tokens)
        seen.append(counters(llm))
    return seen
