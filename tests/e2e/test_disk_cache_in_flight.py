# SPDX-License-Identifier: Apache-2.0
"""Events while blocks move between an engine's pool and the disk."""

import threading
import time
from itertools import count

import mlx.core as mx
import numpy as np
import pytest
from e2e.disk import ask, check_same, disk_engine, disk_hits
from e2e.fuzz.models import VOCAB
from e2e.harness import free_blocks, greedy, run_out

from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.kv_transfer.disk.block_folder import BlockFolder

NUM_TOKENS = 6
MOST_SECONDS = 120


class Gate:
    """Blocks all reads of blocks until it is opened."""

    def __init__(self, monkeypatch):
        self._open = threading.Event()
        self._open.set()
        read = BlockFolder.read

        def held_up(folder, key, parts):
            assert self._open.wait(240)
            return read(folder, key, parts)

        monkeypatch.setattr(BlockFolder, "read", held_up)

    def close(self):
        self._open.clear()

    def open(self):
        self._open.set()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def play(llm, prompts, happen, at, release, gate):
    """Serves prompts at once; `happen()` befalls the engine before step `at`, and reads go on from
    step `release` on. The completion of each prompt; None: it was aborted."""
    core = llm.llm_engine.engine_core.engine_core
    gate.close()
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(
            str(index), {"prompt_token_ids": prompt}, greedy(NUM_TOKENS, logprobs=0)
        )
    done, deadline = {}, time.monotonic() + MOST_SECONDS
    for step in count():
        if step == at:
            happen(llm)
        if step == release:
            gate.open()
        busy = core.scheduler.has_requests() or core.batch_queue
        if step > max(at, release) and not busy:
            break
        if busy:
            for output in llm.llm_engine.step():
                if output.finished:
                    done[int(output.request_id)] = output.outputs[0]
        assert time.monotonic() < deadline, f"{list(core.scheduler.requests)} never end"
    return [done.get(index) for index in range(len(prompts))]


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["async", "sync"])
def served(request, tiny, tmp_path, gate):
    """An engine, two prompts on disk with their answers, and a source of new prompts."""
    rng = np.random.default_rng(1)
    first = rng.integers(2, VOCAB, 200).tolist()
    prompts = [first, [*first[:64], *rng.integers(2, VOCAB, 90).tolist()]]
    with disk_engine(
        tiny,
        tmp_path,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=45,
        async_scheduling=request.param,
        enable_sleep_mode=True,
    ) as llm:
        answers = ask(llm, prompts, NUM_TOKENS)
        run_out(llm)
        yield llm, prompts, answers, lambda: rng.integers(2, VOCAB, 100).tolist()


def sweep(served, gate, happen, failures_are_right=False, steps=(0, 2, 3, 5)):
    """Triggers an event in an engine at every step, with loads in flight or just finished."""
    llm, prompts, answers, another = served
    free = free_blocks(llm)
    for at in steps:
        for release in (at, at + 2):
            assert llm.reset_prefix_cache(), (at, release)
            before = disk_hits(llm)
            fresh = another()
            (expected,) = ask(llm, [fresh], NUM_TOKENS)
            assert llm.reset_prefix_cache()
            newest = another()
            sent = [prompts[0], newest, prompts[1], fresh, prompts[0]]
            found = play(llm, sent, happen, at, release, gate)
            assert free_blocks(llm) == free, (at, release)
            wanted = [answers[0], None, answers[1], expected, answers[0]]
            for index, (completion, right) in enumerate(zip(found, wanted, strict=True)):
                where = (at, release, index)
                if completion is None or completion.finish_reason == "error":
                    assert failures_are_right, where
                elif right is not None:
                    assert list(completion.token_ids) == right.tokens, where
            assert llm.reset_prefix_cache(), (at, release)
            check_same(ask(llm, prompts, NUM_TOKENS), answers)
            assert disk_hits(llm) - before >= 192 + 144, (at, release)


def test_resets_that_start_all_again(served, gate):
    sweep(served, gate, lambda llm: llm.reset_prefix_cache(reset_running_requests=True))


@pytest.mark.more
def test_resets_of_the_connector_as_well(served, gate):
    sweep(
        served,
        gate,
        lambda llm: llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
    )


@pytest.mark.more
@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sleep(served, gate, level):
    def nap(llm):
        llm.sleep(level, mode="keep")
        llm.wake_up()

    sweep(served, gate, nap)


@pytest.mark.more
def test_aborts(served, gate):
    def abort(llm):
        llm.llm_engine.abort_request(["0", "2"])

    sweep(served, gate, abort, failures_are_right=True)


PLACES = {
    "laid out": (ModelExecutor, "forward_hidden"),
    "handed over": (mx, "async_eval"),
    "awaited": (StepOutput, "token_ids"),
}


@pytest.mark.parametrize(
    "place",
    ["laid out", *(pytest.param(p, marks=pytest.mark.slow) for p in ("handed over", "awaited"))],
)
def test_steps_that_fail(served, gate, monkeypatch, place):
    holder, name = PLACES[place]
    original = getattr(holder, name)
    failing = False

    def sometimes(*arguments):
        nonlocal failing
        if failing:
            failing = False
            raise RuntimeError("[malloc] Unable to allocate 42 bytes.")
        return original(*arguments)

    def fail(llm):
        nonlocal failing
        failing = True

    monkeypatch.setattr(holder, name, sometimes)
    sweep(served, gate, fail, failures_are_right=True)
