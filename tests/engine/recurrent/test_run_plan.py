# SPDX-License-Identifier: Apache-2.0
"""Splitting a step's rows into sequences: every row once, and every wanted state."""

import mlx.core as mx
import numpy as np
import pytest

from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.recurrent.run_plan import RunPlan

BLOCK = 16


def layout_of(begins, counts, drafts, tables, block_size=BLOCK):
    """Makes a step of requests with these first positions and row counts."""
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return StepLayout(
        bounds,
        (np.array(begins) + counts).astype(np.int32),
        np.array(tables, np.int32),
        np.zeros(bounds[-1], np.int32),
        block_size,
        num_drafts_np=None if drafts is None else np.array(drafts, np.int32),
    )


def random_step(rng):
    """Makes a step like vLLM's: a request has its newest token's block and the previous one."""
    num_reqs = int(rng.integers(1, 33))
    begins = rng.integers(0, 200, num_reqs) * rng.integers(0, 2, num_reqs)
    drafts = rng.integers(0, 4, num_reqs) * rng.integers(0, 2, num_reqs)
    counts = 1 + drafts + rng.integers(0, 100, num_reqs) * rng.integers(0, 2, num_reqs)
    last = (begins + counts - 1) // BLOCK
    tables = np.zeros((num_reqs, int(last.max()) + 1), np.int32)
    ids = iter(rng.permutation(np.arange(1, 4096)).tolist())
    for index in range(num_reqs):
        before = max(begins[index] - 1, 0) // BLOCK
        for block in {before, last[index], *range(begins[index] // BLOCK, last[index])}:
            if block in (before, last[index]) or rng.integers(0, 3) == 0:
                tables[index, block] = next(ids)
    return begins, counts, drafts, tables


def read(run, array, of_all):
    return np.arange(of_all) if array is None else np.array(array)


def played(plan, num_reqs, num_rows):
    """Returns the order in which rows are computed, and the rows whose states are stored."""
    rows_of, kept, places = [[] for _ in range(num_reqs)], [], []
    for run in plan.runs:
        rows = np.array(run.rows)
        requests = read(run, run.requests, num_reqs)
        for request, of_request in zip(requests, rows, strict=True):
            rows_of[request] += of_request.tolist()
        kept += [(requests[i], rows[i, -1]) for i in read(run, run.kept, len(rows))]
        places += rows.ravel().tolist()
    order = np.arange(num_rows) if plan.order is None else np.array(plan.order)
    assert np.array(places)[order].tolist() == list(range(num_rows))
    return rows_of, kept


@pytest.mark.parametrize(
    "seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))]
)
def test_random_steps(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        begins, counts, drafts, tables = random_step(rng)
        plan = RunPlan.from_layout(layout_of(begins, counts, drafts, tables))
        bounds = np.concatenate([[0], np.cumsum(counts)])
        rows_of, kept = played(plan, len(counts), bounds[-1])
        for index, rows in enumerate(rows_of):  # a request's in the order of its text
            assert rows == list(range(bounds[index], bounds[index + 1]))
        assert np.array(plan.before).tolist() == [
            tables[index, max(begin - 1, 0) // BLOCK] for index, begin in enumerate(begins)
        ]
        fresh = [False] * len(begins) if plan.fresh is None else np.array(plan.fresh).tolist()
        assert fresh == (begins == 0).tolist()
        # Rows that are kept, and where, for any number of accepted drafts.
        accepted = rng.integers(0, drafts + 1)
        last = bounds[1:] - 1 - drafts + accepted
        wanted = plan.endings.wanted(last)
        found = {
            int(plan.endings.blocks_np[i]): (plan.endings.requests_np[i], plan.endings.rows_np[i])
            for i in wanted
        }
        assert len(found) == len(wanted)  # no block twice
        expected = {}
        for index in range(len(counts)):
            for row in range(bounds[index], last[index] + 1):
                position = begins[index] + row - bounds[index]
                block = tables[index, position // BLOCK]
                if block and (row == last[index] or position % BLOCK == BLOCK - 1):
                    expected[int(block)] = (index, row)
        assert found == expected
        assert set(found.values()) <= set(kept)


def test_calls_do_not_grow_with_requests():
    for num_reqs in (1, 8, 32):
        lengths = [(37 * index) % 64 + 1 for index in range(num_reqs)]
        tables = np.arange(1, 4 * num_reqs + 1).reshape(num_reqs, 4) * [0, 0, 0, 1]
        layout = layout_of([0] * num_reqs, lengths, None, tables, block_size=16)
        assert len(RunPlan.from_layout(layout).runs) <= 7  # powers of two up to 64


def test_a_decode_step_is_one_run_in_order():
    plan = RunPlan.from_layout(layout_of([5, 9, 30], [1, 1, 1], None, [[1, 0], [2, 0], [3, 4]]))
    (run,) = plan.runs
    assert run.rows.tolist() == [[0], [1], [2]]
    assert run.requests is None and run.kept is None and plan.order is None and plan.fresh is None


def test_states_are_not_wanted_before_drafts_are_judged():
    plan = RunPlan.from_layout(layout_of([5], [3], [2], [[1]]))
    with pytest.raises(RuntimeError, match="drafts were verified"):
        plan.endings.wanted(None)
    plan = RunPlan.from_layout(layout_of([5], [3], [0], [[1]]))
    assert plan.endings.wanted(None).tolist() == [0]
    assert isinstance(plan.before, mx.array)
