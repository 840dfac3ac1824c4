# SPDX-License-Identifier: Apache-2.0
"""A step's jobs between the hooks of a step, on a tiny pool and a real disk cache."""

import time
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from kv_transfer.small_pool import FINGERPRINT, SmallPool, keys_of, on_disk, store_on
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from vllm_metal.kv_transfer.messages import TransferMetadata
from vllm_metal.kv_transfer.transfer_hooks import TransferHooks


class Runner:
    def __init__(self, pool):
        self.layers = SimpleNamespace(block_pages=lambda: pool.pages)
        self.settled, self.joined = [], 0

    def complete_draft_kv(self, ends):
        if ends:
            self.settled.append(dict(ends))

    def join_step(self, arrays):
        mx.async_eval(arrays)
        self.joined += bool(arrays)


@pytest.fixture
def pool():
    return SmallPool()


@pytest.fixture
def runner(pool):
    return Runner(pool)


@pytest.fixture
def is_waited_for():
    return False


@pytest.fixture
def hooks(tmp_path, runner, is_waited_for):
    made = TransferHooks(store_on(tmp_path / "cache"), lambda: FINGERPRINT, 4, is_waited_for)
    made.pool_made(runner)
    yield made
    made.before_pool_goes(lost=True)
    made.close()


def store_job(req_id, names, blocks):
    blocks = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    return TransferJob(req_id=req_id, src_spec=blocks, dst_spec=keys_of(names))


def load_job(req_id, names, blocks):
    blocks = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    return TransferJob(req_id=req_id, src_spec=keys_of(names), dst_spec=blocks)


def step(hooks, stores=(), loads=(), new=(), scheduled=(), computed=True, pool_valid=True, **told):
    """A step's hooks; the jobs and requests that the scheduler hears have ended.

    It is known at once that the step was computed, unless `known` says no.
    """
    known = told.pop("known", True)
    finished = told.pop("finished", set())
    metadata = TransferMetadata(dict(loads), dict(stores), **told)
    output = replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=[SimpleNamespace(req_id=req_id) for req_id in new],
        num_scheduled_tokens=dict.fromkeys(scheduled, 1),
        finished_req_ids=finished,
        kv_connector_metadata=metadata,
    )
    hooks.before_step(output, pool_valid)
    if pool_valid:
        hooks.before_forward()
    if scheduled and computed:
        hooks.before_submit()
    outcome = hooks.after_step(computed)
    if scheduled and computed and known:
        hooks.steps_computed(0)
    return outcome


def finish(hooks, *jobs, before=None):
    """Empty steps until the jobs have ended; all outcomes, that of the step before among them.

    A job may end in the step that brings it, if its thread is quick.
    """
    outcomes, deadline = [before], time.monotonic() + 60
    while not set(jobs) <= ended_jobs(outcomes):
        assert time.monotonic() < deadline
        outcomes.append(step(hooks))
    return [outcome for outcome in outcomes if outcome is not None]


def ended_jobs(outcomes):
    told = [outcome.kv_connector_worker_meta for outcome in outcomes if outcome is not None]
    return {job_id for news in told for job_id in news.completed_jobs}


@pytest.mark.parametrize("is_waited_for", [True])
def test_blocks_go_with_the_step_after_the_one_that_completes_them(hooks, runner, pool):
    step(hooks, {0: store_job("r", "ab", [3, 5])}, new=["r"], scheduled=["r"])
    assert runner.joined == 0
    second = step(hooks, scheduled=["r"])
    assert runner.joined == 1 and runner.settled == [{"r": 8}]
    finish(hooks, 0, before=second)
    assert on_disk(hooks.store, keys_of("ab")) == [pool.block(3), pool.block(5)]


def test_an_idle_step_completes_blocks_before_it_copies_them(hooks, runner, pool):
    step(hooks, {0: store_job("r", "ab", [3, 5])}, new=["r"], scheduled=["r"])
    assert runner.settled == []
    idle = step(hooks)
    assert runner.settled == [{"r": 8}]
    finish(hooks, 0, before=idle)
    assert on_disk(hooks.store, keys_of("ab")) == [pool.block(3), pool.block(5)]


def test_blocks_of_a_request_that_has_ended_are_copied_before_others_get_them(hooks, runner, pool):
    step(hooks, new=["r"], scheduled=["r"])
    before = pool.block(3)
    job = {0: store_job("r", "a", [3])}
    flushed = step(hooks, job, scheduled=["s"], new=["s"], finished={"r"}, jobs_to_flush={0})
    assert runner.settled[0] == {"r": 4}
    pool.fill(3, 1.0)
    finish(hooks, 0, before=flushed)
    assert on_disk(hooks.store, keys_of("a")) == [before]


@pytest.mark.parametrize("why", ["the step failed", "it is void", "it never ran on this pool"])
def test_a_job_whose_blocks_hold_nothing_ends_at_once(hooks, why):
    told = {"invalid_requests": frozenset(["r"])} if why == "it is void" else {}
    new = [] if why == "it never ran on this pool" else ["r"]
    computed = why != "the step failed"
    job = {0: store_job("r", "a", [3])}
    outcome = step(hooks, job, new=new, scheduled=["r"], computed=computed, **told)
    assert outcome.kv_connector_worker_meta.completed_jobs == {0: 1}
    assert not outcome.finished_recving and not outcome.failed_recving
    finish(hooks)
    assert on_disk(hooks.store, keys_of("a")) == [None]


def test_a_load_reaches_its_blocks_and_its_end_is_told_once(hooks, pool):
    step(hooks, {0: store_job("r", "ab", [3, 5])}, new=["r"], scheduled=["r"])
    finish(hooks, 0)
    first = step(hooks, loads={1: load_job("s", "ab", [7, 8])})
    outcomes = finish(hooks, 1, before=first)
    outcomes.append(step(hooks))
    assert [outcome.finished_recving for outcome in outcomes if ended_jobs([outcome])] == [{"s"}]
    assert not any(outcome.failed_recving for outcome in outcomes if outcome is not None)
    assert (pool.block(7), pool.block(8)) == (pool.block(3), pool.block(5))


@pytest.mark.parametrize("how", ["finished", "cancelled_loads"])
def test_a_load_whose_blocks_are_taken_away_writes_nothing(hooks, pool, how):
    step(hooks, {0: store_job("r", "a", [3])}, new=["r"], scheduled=["r"])
    finish(hooks, 0)
    before = pool.block(7)
    step(hooks, loads={1: load_job("s", "a", [7])}, pool_valid=False, computed=False)
    (outcome,) = [step(hooks, **{how: frozenset(["s"])})]
    assert outcome.finished_recving == {"s"} and not outcome.failed_recving
    assert ended_jobs([step(hooks)]) == set()
    assert pool.block(7) == before


def test_a_pool_that_is_lost_ends_all_jobs_and_one_that_goes_keeps_what_is_due(hooks, pool):
    jobs = {0: store_job("r", "a", [3]), 1: store_job("r", "b", [5])}
    load = {2: load_job("s", "c", [7])}
    outcomes = [step(hooks, {0: jobs[0]}, new=["r"], scheduled=["r"], loads=load)]
    expected = pool.block(3)
    hooks.before_pool_goes(lost=False)
    hooks.pool_made(Runner(pool))
    outcomes.append(step(hooks, {1: jobs[1]}, new=["r"], scheduled=["r"]))
    assert ended_jobs(outcomes) == {0, 2}
    hooks.before_pool_goes(lost=True)
    hooks.pool_made(Runner(pool))
    assert ended_jobs([step(hooks)]) == {1}
    assert on_disk(hooks.store, keys_of("ab")) == [expected, None]
