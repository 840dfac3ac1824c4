# SPDX-License-Identifier: Apache-2.0
"""Metrics of an engine's steps: counts match, and times add up."""

import logging
import re
import time

import mlx.core as mx
import pytest
from e2e.harness import engine, greedy
from prometheus_client import REGISTRY

from vllm_metal.metrics.stat_logger import logger
from vllm_metal.metrics.step_meter import StepRows

NUM_TOKENS = 12


def serve(llm, prompts):
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], greedy(NUM_TOKENS), use_tqdm=False
    )


def metrics(llm):
    """Returns the metrics by name that are not per request."""
    return {metric.name: metric for metric in llm.get_metrics() if "metal" in metric.name}


def by_kind():
    """Returns device time by kind; vLLM's own counter reader only supports integers."""
    return {
        sample.labels["kind"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:metal_device_seconds_total"
    }


@pytest.mark.parametrize(
    "async_scheduling",
    [True, pytest.param(False, marks=pytest.mark.more)],
    ids=["async", "sync"],
)
def test_each_step_has_its_figures(tiny, tiny_text, async_scheduling):
    with engine(
        tiny,
        max_model_len=128,
        async_scheduling=async_scheduling,
        # The prompt takes three steps, of which the first two sample nothing.
        max_num_batched_tokens=32,
        max_num_seqs=2,
    ) as llm:
        began = time.perf_counter()
        serve(llm, [tiny_text[:80]])
        passed = time.perf_counter() - began
        found = metrics(llm)
        host = found["vllm:metal_step_host_seconds"]
        device = found["vllm:metal_step_device_seconds"]
        # With async scheduling a step more is planned before the last token is known.
        assert host.count in ((2 + NUM_TOKENS,) if not async_scheduling else (14, 15))
        assert device.count in ((NUM_TOKENS,) if not async_scheduling else (12, 13))
        assert 0 < host.sum < passed
        assert 0 < device.sum < passed
        kinds = by_kind()
        assert kinds["prefill"] > 0 and kinds["decode"] > 0
        assert sum(kinds.values()) == pytest.approx(device.sum)
        memory = found["vllm:metal_device_memory_bytes"].value
        assert mx.get_active_memory() <= memory <= mx.get_peak_memory() + mx.get_cache_memory()
        assert found["vllm:metal_memory_budget_bytes"].value >= memory
        assert found["vllm:metal_failed_steps"].value == 0


@pytest.mark.parametrize(
    ("drafts", "async_scheduling"),
    [
        (3, True),
        (0, False),
        pytest.param(0, True, marks=pytest.mark.more),
        pytest.param(3, False, marks=pytest.mark.more),
    ],
)
def test_rows_of_prompts_are_their_tokens(tiny, tiny_text, monkeypatch, async_scheduling, drafts):
    """Has chunks, answers beside them, and a cached prefix; other rows belong to answers."""
    steps, of = [], StepRows.of
    monkeypatch.setattr(
        StepRows, "of", staticmethod(lambda step: steps.append(of(step)) or of(step))
    )
    method = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1}
    with engine(
        tiny,
        max_model_len=128,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=32,
        max_num_seqs=2,
        speculative_config=method if drafts else None,
        additional_config={"fixed_draft_length": bool(drafts)},
    ) as llm:
        outputs = serve(llm, [tiny_text[:80], tiny_text[7:60], tiny_text[:80]])
        drafted = {metric.name: metric for metric in llm.get_metrics()}
    computed = sum(len(o.prompt_token_ids) - o.num_cached_tokens for o in outputs)
    total = sum(steps, StepRows())
    # An answer's first token comes of its prompt's last row.
    one_each = len(outputs) * (NUM_TOKENS - 1)
    assert total.prefill == computed
    if drafts:
        rejected = (
            drafted["vllm:spec_decode_num_draft_tokens"].value
            - drafted["vllm:spec_decode_num_accepted_tokens"].value
        )
        assert rejected > 0 and total.decode >= one_each + rejected
    else:
        # With async scheduling a row more may be planned before an answer's end is known.
        assert one_each <= total.decode <= one_each + len(outputs) * async_scheduling
    assert any(step.prefill and step.decode for step in steps)


@pytest.mark.parametrize(
    "async_scheduling",
    [True, pytest.param(False, marks=pytest.mark.more)],
    ids=["async", "sync"],
)
def test_a_step_that_fails_is_counted(tiny, tiny_text, monkeypatch, async_scheduling):
    with engine(tiny, max_model_len=128, async_scheduling=async_scheduling) as llm:
        async_eval, calls = mx.async_eval, 0

        def raise_once(*arguments):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("[malloc] Unable to allocate 42 bytes.")
            return async_eval(*arguments)

        monkeypatch.setattr(mx, "async_eval", raise_once)
        outputs = serve(llm, [tiny_text[:40]])
        assert outputs[0].outputs[0].finish_reason == "error"
        serve(llm, [tiny_text[:40]])  # its steps bring the count
        assert metrics(llm)["vllm:metal_failed_steps"].value == 1


def test_acceptance_and_hit_rate_stand_in_one_line(tiny, tiny_text):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)  # which forgets what the level before allowed
    try:
        with engine(
            tiny,
            max_model_len=256,
            speculative_config={
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 1,
            },
            additional_config={"fixed_draft_length": True},
        ) as llm:
            for _ in range(2):
                serve(llm, [tiny_text[:40] * 3])
            llm.llm_engine.do_log_stats()
            counted = {metric.name: metric for metric in llm.get_metrics()}
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    found = re.search(
        r"Prefix cache hit rate: ([\d.]+)%, Draft acceptance rate: ([\d.]+)%$", lines[-1]
    )
    assert found, lines

    def ratio(part, whole):
        return 100 * counted[f"vllm:{part}"].value / counted[f"vllm:{whole}"].value

    hits, acceptance = map(float, found.groups())
    assert hits == pytest.approx(ratio("prefix_cache_hits", "prefix_cache_queries"), abs=0.06)
    drafted = ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")
    assert acceptance == pytest.approx(ratio(*drafted), abs=0.06)
    assert hits > 0 and counted["vllm:spec_decode_num_draft_tokens"].value > 0
