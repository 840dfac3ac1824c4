# SPDX-License-Identifier: Apache-2.0
"""Runs engines with limited memory, and measures the memory of their steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import psutil
from e2e.harness import counters, engine, greedy
from vllm import LLM

from vllm_metal.engine.memory.advice import BudgetError

MIB = 2**20


@dataclass(frozen=True)
class Played:
    """Measurements of an engine's steps."""

    limit: int  # MLX's memory limit in bytes
    peaks: list[int]  # peak of MLX's memory in each step
    rows: list[int]  # tokens of each step
    drafts: list[int]  # verified drafts of each step
    requests: list[int]  # requests of each step
    blocks: int  # blocks in the pool

    @property
    def ratio(self) -> float:
        return max(self.peaks) / self.limit


def options(share: int, **settings: Any) -> dict[str, Any]:
    """Returns options of an engine that sizes its own pool, for `share` bytes of this machine."""
    return {
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": share / psutil.virtual_memory().total,
        "skip_tokenizer_init": True,
        "additional_config": {"fixed_draft_length": True},
    } | settings


def ngram(num_drafts: int) -> dict[str, Any]:
    """Returns n-gram speculation with as many drafts as possible at every repeated token."""
    return {
        "method": "ngram",
        "num_speculative_tokens": num_drafts,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }


def play(model: str, prompts: Sequence[list[int]], max_tokens: int, **settings: Any) -> Played:
    """Serves all prompts at once, and reads MLX's memory after every step.

    A peak counts live buffers, without freed ones, between two steps' results; MLX
    also counts queued operations.
    """
    with engine(model, **settings) as llm:
        return _played(llm, prompts, max_tokens)


def _played(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> Played:
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output
    peaks, rows, drafts, requests = [], [], [], []

    def update_from_output(output: Any, result: Any) -> Any:
        if output.num_scheduled_tokens:
            peaks.append(mx.get_peak_memory())
            rows.append(sum(output.num_scheduled_tokens.values()))
            missing = sum((output.num_invalid_spec_tokens or {}).values())
            drafts.append(sum(map(len, output.scheduled_spec_decode_tokens.values())) - missing)
            requests.append(len(output.num_scheduled_tokens))
            mx.reset_peak_memory()
        return update(output, result)

    scheduler.update_from_output = update_from_output
    mx.reset_peak_memory()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        greedy(max_tokens, detokenize=False),
        use_tqdm=False,
    )
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    limit = int(counters(llm)["vllm:metal_memory_budget_bytes"])
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    return Played(limit, peaks, rows, drafts, requests, blocks)


def play_in_the_least(
    model: str, prompts: Sequence[list[int]], max_tokens: int, share: int, **settings: Any
) -> Played:
    """Runs `play` on the first large enough device, each a quarter larger than the last."""
    while True:
        try:
            return play(model, prompts, max_tokens, **options(share, **settings))
        except BudgetError:
            share += share // 4
