# SPDX-License-Identifier: Apache-2.0
"""A GPU's error goes to whoever asks first: whoever that is, nothing that was computed beside it is
returned or kept, and the engine goes on, or ends with the reason."""

import logging
from itertools import count

import numpy as np
import pytest
from e2e.disk import ask, check_same, disk_engine
from e2e.drafting import VOCAB as FEW
from e2e.drafting import drafting_engine, write_toys
from e2e.failing_device import ENDS, MESSAGE, FailingDevice
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, engine, free_blocks, greedy, run_out

from vllm_metal.engine.worker import recovery
from vllm_metal.engine.worker.early_reads import EarlyReads
from vllm_metal.engine.worker.recovery import MAX_FAILURES_IN_A_ROW, STEPS_THAT_END_A_ROW

NUM_TOKENS = 6
BOTH = pytest.mark.parametrize(
    "async_scheduling",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["async", "sync"],
)
MOST_STEPS = 2_000  # an engine with these requests takes some 50


@pytest.fixture(scope="module")
def dense(tiny):
    return Dense(tiny)


@pytest.fixture
def device(monkeypatch):
    return FailingDevice(monkeypatch)


@pytest.fixture
def warnings():
    """Logged warnings about failures."""
    said = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    logger, handler = logging.getLogger(recovery.__name__), Handler(logging.WARNING)
    logger.addHandler(handler)
    yield lambda: [line for line in said if line.startswith("A step that used a graph")]
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(2, VOCAB, length).tolist() for length in (40, 25, 90, 33)]


def serve(llm, prompts, max_tokens=NUM_TOKENS, between=lambda: None):
    """The completion of each prompt, all sent at once, and the longest text of it that was told.

    None may wait for ever.
    """
    for index, prompt in enumerate(prompts):
        llm.llm_engine.add_request(
            str(index), {"prompt_token_ids": prompt}, greedy(max_tokens, logprobs=0)
        )
    done, told = {}, {}
    for step in count():
        if not llm.llm_engine.has_unfinished_requests():
            return [(done[str(index)], told[str(index)]) for index in range(len(prompts))]
        between()
        assert step < MOST_STEPS, f"of {len(prompts)} requests these ended: {sorted(done)}"
        for output in llm.llm_engine.step():
            completion = output.outputs[0]
            before = told.get(output.request_id, [])
            told[output.request_id] = max(before, list(completion.token_ids), key=len)
            if output.finished:
                done[output.request_id] = completion


def check(dense, prompts, completions):
    """Asserts that every token is right, also of failed requests; returns failed indices."""
    failed = []
    for index, (prompt, (completion, told)) in enumerate(zip(prompts, completions, strict=True)):
        if told:
            dense.check(prompt, told)
        if completion.finish_reason == "error":
            assert completion.stop_reason == f"the step failed: {MESSAGE}"
            failed.append(index)
        else:
            assert completion.finish_reason == "length"
    return failed


def failures(llm):
    return counters(llm)["vllm:metal_failed_steps"]


def outlive(llm, dense, prompts):
    """Serves enough requests to reset the count of consecutive failures."""
    completions = serve(llm, prompts[:1], STEPS_THAT_END_A_ROW + 1)
    assert check(dense, prompts[:1], completions) == []


@BOTH
def test_no_token_of_a_step_that_failed_is_told(
    tiny, dense, prompts, device, warnings, async_scheduling
):
    """Two of four requests are served at a time. The device fails in prefill, at the first decode
    step, at one by graphs, and after requests have ended."""
    settings = {"max_model_len": 128, "max_num_seqs": 2, "async_scheduling": async_scheduling}
    with engine(tiny, **settings) as llm:
        free, cases = free_blocks(llm), [(n, ends) for n in (0, 3, 7) for ends in ENDS]
        for number, (at, ends) in enumerate(cases, 1):
            device.fail_step(at, ends)
            failed = check(dense, prompts, serve(llm, prompts))
            # Those that run, and all of those: the others' steps were known to be computed.
            assert failed == ([2, 3] if at == 7 else [0, 1]), (at, ends)
            assert failures(llm) == len(device.taken) == number
            assert free_blocks(llm) == free
            outlive(llm, dense, prompts)
    takers = {call for call, _ in device.taken}
    assert {"async_eval", "token_ids"} <= takers
    assert len(warnings()) == 1


def test_nor_where_tokens_are_read_after_the_next_hand_over(
    tiny, dense, prompts, device, monkeypatch
):
    """Where a GPU is slower than its host, a step's check is its own evaluation."""
    monkeypatch.setattr(EarlyReads, "before_submit", lambda *_, **__: None)
    with engine(tiny, max_model_len=128, max_num_seqs=2, async_scheduling=True) as llm:
        for number, ends in enumerate(ENDS, 1):
            device.fail_step(3, ends)
            assert check(dense, prompts, serve(llm, prompts)) == [0, 1], ends
            assert failures(llm) == len(device.taken) == number
            outlive(llm, dense, prompts)


@pytest.mark.more
@pytest.mark.parametrize("at", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_what_a_step_that_failed_left_is_neither_kept_nor_found(
    tiny, device, tmp_path, monkeypatch, at
):
    """Blocks leave the pool with the step after the one that completes them."""
    monkeypatch.setattr("vllm_metal.kv_transfer.transfer_hooks.BATCH_STEPS", 0)
    settings = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    rng = np.random.default_rng(6)
    texts = [[rng.integers(2, VOCAB, n).tolist() for n in (40, 25, 90, 33)] for _ in ENDS]
    with engine(tiny, **settings) as llm:
        answers = [ask(llm, prompts, STEPS_THAT_END_A_ROW) for prompts in texts]
    with disk_engine(tiny, tmp_path, **settings) as llm:
        for number, (ends, prompts) in enumerate(zip(ENDS, texts, strict=True)):
            device.fail_step(at, ends)
            completions = serve(llm, prompts, STEPS_THAT_END_A_ROW)
            run_out(llm)
            assert len(device.taken) == failures(llm) == number + 1, ends
            assert "error" in [each.finish_reason for each, _ in completions]
            for _ in range(2):  # from disk what there is; the second time, all
                assert llm.reset_prefix_cache()
                found = ask(llm, prompts, STEPS_THAT_END_A_ROW)
                check_same(found, answers[number])
                run_out(llm)
            assert all(answer.cached for answer in found), ends
        assert {thread for _, thread in device.taken} == {"MainThread"}


def test_a_graph_that_fails_when_evaluated_is_used_once(tiny, dense, prompts, device, warnings):
    with engine(tiny, max_model_len=128, max_num_seqs=2) as llm:
        device.fail_graphs()
        assert check(dense, prompts, serve(llm, prompts)) == [0, 1]
        for _ in range(MAX_FAILURES_IN_A_ROW + 1):
            assert check(dense, prompts, serve(llm, prompts)) == []
        assert failures(llm) == len(device.taken) == 1
    assert len(warnings()) == 1


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_steps_that_are_right_between_do_not_hide_a_model_that_fails(tiny, dense, device, every):
    prompts = [[1, 2, 3]] * 8
    with engine(tiny, max_model_len=128, max_num_seqs=1) as llm:
        device.fail_steps(lambda step: step % every == every - 1, ENDS[1])
        with pytest.raises(RuntimeError, match="Caused GPU Timeout"):
            serve(llm, prompts, max_tokens=40)
        with pytest.raises(RuntimeError, match="Caused GPU Timeout"):  # it stays so
            serve(llm, prompts)
    assert len(device.taken) == MAX_FAILURES_IN_A_ROW + 1


@pytest.mark.parametrize(
    ("name", "async_scheduling"),
    [
        pytest.param("draft_model", True, marks=pytest.mark.more),
        pytest.param("eagle", True, marks=pytest.mark.slow),
        pytest.param("draft_model", False, marks=pytest.mark.slow),
        pytest.param("eagle", False, marks=pytest.mark.slow),
    ],
)
def test_drafts(toys, device, name, async_scheduling):
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, FEW, length).tolist() for length in (20, 45, 33)]
    dense = Dense(toys[name].model)
    with drafting_engine(toys[name], None, async_scheduling=async_scheduling) as llm:
        device.fail_graphs(ENDS[1])  # of the draft model as well
        check(dense, prompts, serve(llm, prompts, 12))
        assert failures(llm) == 1
        for number, ends in enumerate(ENDS, 2):
            outlive(llm, dense, prompts)
            device.fail_step(3, ends)
            assert check(dense, prompts, serve(llm, prompts, 12)) == [0, 1, 2], ends
            assert failures(llm) == len(device.taken) == number


@pytest.mark.more
def test_two_steps_in_flight_on_kernels_whose_drafts_nobody_has_read(tmp_path, device, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    toy = write_toys(tmp_path, for_kernels=True)["draft_model"]
    prompts = [[(7 * i * i + 3 * n + i // 5) % 8 for i in range(n)] for n in (5, 33, 50)]
    dense = Dense(toy.model)
    with drafting_engine(toy, None, async_scheduling=True, max_model_len=128) as llm:
        for number, (at, ends) in enumerate(zip((2, 3, 5), ENDS[1:], strict=True), 1):
            device.fail_step(at, ends)
            assert check(dense, prompts, serve(llm, prompts, 12)) == [0, 1, 2], ends
            assert failures(llm) == len(device.taken) == number


@pytest.mark.more
def test_an_error_between_steps_fails_those_in_flight(tiny, dense, prompts, device):
    """Another caller that waits for the device meets the error and does not notice."""
    for call in ("synchronize_device", "check_health"):
        with engine(tiny, max_model_len=128, max_num_seqs=4) as llm:
            outlive(llm, dense, prompts)
            device.fail_step(2, ENDS[1])
            core = llm.llm_engine.engine_core.engine_core
            first = device.num_steps

            def meet(call=call, core=core, first=first):
                if device.num_steps == first + 3:
                    core.model_executor.collective_rpc(call)

            completions = serve(llm, prompts, between=meet)
            assert check(dense, prompts, completions) == [0, 1, 2, 3]
            assert failures(llm) == 1
