# SPDX-License-Identifier: Apache-2.0
"""Prefill beside streams is bounded by time, on the test's clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import engine, generate, greedy
from vllm.sampling_params import RequestOutputKind

from vllm_metal.patches.vllm_patches import step_budget

#: A step's seconds: this, and so much for each of its rows. 20.5 ms where one stream decodes, so
#: that 79 tokens fit beside it into 60 ms.
STEP_S, ROW_S = 0.02, 0.0005
MOST, LONG = 256, 400  # tokens of a step, of a prompt


class Played:
    """An engine, the contents of its steps, and a clock that they advance."""

    def __init__(self, llm, monkeypatch) -> None:
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._decoding: set[str] = set()
        self.steps: list[dict[str, int]] = []  # tokens by request, in order of their ends
        self.texts: dict[str, list[int]] = {}
        self._now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self._now)
        monkeypatch.setattr(step_budget, "time", clock)
        update = self._scheduler.update_from_output

        def update_from_output(output, result):
            if output.num_scheduled_tokens:
                rows = output.num_scheduled_tokens
                self.steps.append({name.rsplit("-", 1)[0]: n for name, n in rows.items()})
                self._now += STEP_S + ROW_S * sum(rows.values())
            return update(output, result)

        monkeypatch.setattr(self._scheduler, "update_from_output", update_from_output)

    def add(self, name, prompt, max_tokens, kind=RequestOutputKind.CUMULATIVE) -> None:
        params = greedy(max_tokens, output_kind=kind, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self) -> None:
        for output in self._engine.step():
            self.texts[output.request_id] = list(output.outputs[0].token_ids)

    def until(self, name, num_tokens=1) -> list[dict[str, int]]:
        """Steps until a request has `num_tokens` tokens; returns the ended requests."""
        before = len(self.steps)
        while len(self.texts.get(name, ())) < num_tokens:
            self.step()
        return self.steps[before:]

    def run_out(self) -> None:
        while self._engine.has_unfinished_requests():
            self.step()


@contextmanager
def played(model, monkeypatch, **options) -> Iterator[Played]:
    options = {"additional_config": {"max_step_ms": 60}} | options
    with engine(model, max_model_len=480, max_num_batched_tokens=MOST, **options) as llm:
        yield Played(llm, monkeypatch)


def prompts(count, length=LONG):
    return np.random.default_rng(4).integers(2, VOCAB, (count, length)).tolist()


def beside_a_stream(play, kind=RequestOutputKind.CUMULATIVE):
    """Returns the steps of two consecutive long prompts beside a decoding request."""
    first, *others = prompts(3)
    play.add("stream", first[:40], 160, kind)
    for _ in range(8):
        play.step()
    found = []
    for number, prompt in enumerate(others):
        play.add(f"long {number}", prompt, 8)
        found.append(play.until(f"long {number}"))
        play.until(f"long {number}", 8)
    play.run_out()
    return found


@pytest.mark.parametrize(
    "ahead",
    [pytest.param(True, id="async"), pytest.param(False, id="sync", marks=pytest.mark.slow)],
)
def test_chunks_beside_a_stream_fit_into_the_time_and_change_no_token(tiny, monkeypatch, ahead):
    options = {"async_scheduling": ahead, "enable_prefix_caching": False}
    with played(tiny, monkeypatch, additional_config={"max_step_ms": None}, **options) as unbounded:
        found = beside_a_stream(unbounded)
        expected = unbounded.texts
    assert max(step.get("long 1", 0) for step in found[1]) == MOST - 1
    with played(tiny, monkeypatch, **options) as play:
        _, second = beside_a_stream(play)
    assert play.texts == expected
    assert all(step.get("stream") == 1 for step in second), "a stream loses no step"
    chunks = [step["long 1"] for step in second if step.get("long 1", 0) > 1]
    assert sum(chunks) == LONG
    assert all(70 <= chunk <= 88 for chunk in chunks[1:-1]), chunks
    assert max(chunks) <= 95


@pytest.mark.more
def test_a_bound_of_its_users(tiny, monkeypatch):
    with played(tiny, monkeypatch, additional_config={"max_step_ms": 100}) as play:
        _, second = beside_a_stream(play)
    chunks = [step["long 1"] for step in second if step.get("long 1", 0) > 1]
    assert all(145 <= chunk <= 175 for chunk in chunks[:-1]), chunks  # 159 fit


def test_nobody_waits_for_tokens(tiny, monkeypatch):
    """Alone, or beside texts that are not streamed, chunks have vLLM's lengths."""
    with played(tiny, monkeypatch) as play:
        play.add("alone", prompts(1)[0], 2)
        steps = play.until("alone")
        play.run_out()
        assert [step["alone"] for step in steps[:2]] == [MOST, LONG - MOST]
        _, second = beside_a_stream(play, RequestOutputKind.FINAL_ONLY)
        chunks = [step["long 1"] for step in second if step.get("long 1", 0) > 1]
        assert chunks == [MOST - 1, LONG - MOST + 1]


def test_the_longest_a_prompt_may_take_of_a_step_is_kept(tiny, monkeypatch):
    options = {"long_prefill_token_threshold": 48, "enable_prefix_caching": False}
    with played(tiny, monkeypatch, **options) as play:
        first, second, third = prompts(3)
        play.add("stream", first[:40], 100)
        play.until("stream")
        play.add("long 0", second, 8)
        play.add("long 1", third, 8)
        steps = play.until("long 1")
    both = [step for step in steps if {"long 0", "long 1"} <= step.keys()]
    assert all(step["stream"] == 1 for step in steps)
    assert max(max(step.values()) for step in steps) <= 48
    assert {step["long 0"] + step["long 1"] for step in both if step["long 1"] > 1} & {
        *range(64, 97)
    }


@pytest.mark.more
def test_drafts_of_streams_are_not_cut(tiny, monkeypatch):
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    options = {"enable_prefix_caching": False, "speculative_config": drafts}
    with played(tiny, monkeypatch, additional_config={"max_step_ms": None}, **options) as play:
        beside_a_stream(play)
        expected = play.texts
    with played(tiny, monkeypatch, **options) as play:
        _, second = beside_a_stream(play)
    assert play.texts == expected
    assert all(step["stream"] >= 1 for step in second)
    chunks = [step["long 1"] for step in second if step.get("long 1", 0) > 4]
    assert sum(chunks) == LONG and max(chunks) <= 95


@pytest.mark.more
def test_a_batch_is_computed_as_without_a_bound(tiny, monkeypatch):
    texts = prompts(6, 200)
    with engine(tiny, max_model_len=480, max_num_batched_tokens=MOST) as llm:
        play = Played(llm, monkeypatch)
        bounded = generate(llm, texts, greedy(8))
    with engine(
        tiny,
        max_model_len=480,
        max_num_batched_tokens=MOST,
        additional_config={"max_step_ms": None},
    ) as llm:
        other = Played(llm, monkeypatch)
        assert generate(llm, texts, greedy(8)) == bounded
    assert [sorted(step.values()) for step in play.steps] == [
        sorted(step.values()) for step in other.steps
    ]
