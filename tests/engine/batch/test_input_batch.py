# SPDX-License-Identifier: Apache-2.0
"""One step's inputs from the persistent tables."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
from engine.batch.test_requests import new_request

from metal_kernels.layout import PositionLag
from metal_kernels.pace import Pace
from vllm_metal.engine.batch.input_batch import StepDrafts, prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.batch.rows import step_layout


def make():
    requests = Requests(4, 128, BlockTables(1, 4, 9))
    requests.add_request(new_request("long", list(range(100, 150)), ([5, 3, 8, 1],)))
    short = requests.add_request(new_request("short", [7, 8, 9], ([2],)))
    return requests, short


def test_a_chunk_and_a_whole_prompt_in_one_ragged_batch():
    requests, _ = make()
    requests.num_computed_tokens_np[requests["long"].req_idx] = 16
    batch = prepare(requests, {"long": 20, "short": 3}, mx.zeros(4, mx.int32))
    assert batch.query_start_loc_np.tolist() == [0, 20, 23]
    assert batch.seq_lens_np.tolist() == [36, 3]
    assert np.array(batch.input_ids).tolist() == [*range(116, 136), 7, 8, 9]
    assert np.array(batch.positions).tolist() == [*range(16, 36), 0, 1, 2]
    # Only the whole prompt samples, from its last row.
    assert batch.sampling_np.tolist() == [1]
    assert np.array(batch.logits_indices).tolist() == [22]
    assert batch.num_output_tokens_np.tolist() == [0]


def test_slot_mapping_follows_the_block_table():
    requests, _ = make()
    requests.num_computed_tokens_np[requests["long"].req_idx] = 16
    batch = prepare(requests, {"long": 20, "short": 3}, mx.zeros(4, mx.int32))
    layout = step_layout(batch, requests.block_tables.tables_np[0], 16, Pace())
    expected = [3 * 16 + i for i in range(16)] + [8 * 16 + i for i in range(4)]
    assert layout.slot_mapping_np.tolist() == [*expected, 32, 33, 34]


def test_a_token_the_host_does_not_know_comes_from_the_device():
    requests, short = make()
    requests.num_computed_tokens_np[short.req_idx] = 3
    requests.num_tokens_np[short.req_idx] = 4  # sampled by the step in flight
    newest = mx.array([70, 71, 72, 73], mx.int32)
    batch = prepare(requests, {"short": 1}, newest)
    assert np.array(batch.input_ids).tolist() == [70 + short.req_idx]
    assert batch.sampling_np.tolist() == [0]
    assert batch.num_output_tokens_np.tolist() == [1]
    assert batch.logits_indices is None  # every row's logits are wanted


def test_rows_lie_as_far_before_as_the_device_says():
    requests, _ = make()
    short = requests["short"]
    # Its step sampled four tokens, three for drafts; one draft was kept.
    requests.note_sampled(np.array([short.req_idx]), np.array([4]))
    requests.num_computed_tokens_np[short.req_idx] = 6
    requests.num_computed_tokens_np[requests["long"].req_idx] = 12
    requests.block_tables.append(short.req_idx, ([6],))
    lag = PositionLag(mx.array([0, 2], mx.int32), np.array([0, 3], np.int32))
    drafts = StepDrafts(
        mx.array([[0, 0], [80, 81]]), np.array([0, 2], np.int32), np.array([0, 2], np.int32)
    )
    newest = mx.array([70, 71, 72, 73], mx.int32)
    batch = prepare(requests, {"long": 2, "short": 3}, newest, drafts, lag)
    assert np.array(batch.positions).tolist() == [12, 13, 4, 5, 6]
    assert batch.positions_np.tolist() == [12, 13, 6, 7, 8]  # at most
    assert np.array(batch.input_ids).tolist() == [112, 113, 70 + short.req_idx, 80, 81]
    assert batch.sampling_np.tolist() == [1]
    too_many = batch.num_output_tokens_np - np.array(batch.sample_lag.counts)
    assert too_many.tolist() == [2, 3, 4]
    layout = step_layout(batch, requests.block_tables.tables_np[0], 4, None)
    # Blocks of four: "long" has 5, 3, 8, 1; "short" 2 and 6.
    assert np.array(layout.slot_mapping).tolist() == [4, 5, 24, 25, 26]


def test_drafts_of_one_number_are_laid_out_as_any_others():
    """One request's newest token is known, the other's is on the device."""
    found = []
    for counts in ((2, 2), (2, 1)):
        requests, short = make()
        long = requests["long"]
        requests.num_computed_tokens_np[long.req_idx] = 49
        requests.num_computed_tokens_np[short.req_idx] = 3
        requests.num_tokens_np[short.req_idx] = 4
        counts = np.array(counts, np.int32)
        drafts = StepDrafts(mx.array([[80, 81, 82], [90, 91, 92]]), counts, counts)
        newest = mx.array([70, 71, 72, 73], mx.int32)
        scheduled = {"long": 1 + int(counts[0]), "short": 1 + int(counts[1])}
        batch = prepare(requests, scheduled, newest, drafts)
        verified = np.array(batch.draft_spans.draft_ids).tolist()
        found.append((np.array(batch.input_ids).tolist(), verified))
    sampled = 70 + short.req_idx
    assert found[0] == ([149, 80, 81, sampled, 90, 91], [80, 81, -1, 90, 91, -1])
    assert found[1] == ([149, 80, 81, sampled, 90], [80, 81, -1, 90, -1])


def test_slots_are_computed_anew_for_other_tokens_blocks_or_lags():
    requests, _ = make()
    tables_np, newest = requests.block_tables.tables_np[0], requests.block_tables.newest_slots
    requests.num_computed_tokens_np[requests["long"].req_idx] = 16
    batch = prepare(requests, {"long": 20, "short": 3}, mx.zeros(4, mx.int32))

    before = [None, None]

    def slots(rows):
        found = step_layout(rows, tables_np, 16, None, newest=newest)
        wanted = step_layout(rows, tables_np, 16, None)
        assert found.slot_mapping_np.tolist() == wanted.slot_mapping_np.tolist()
        if wanted.slot_mapping is not None:
            assert found.slot_mapping.tolist() == wanted.slot_mapping.tolist()
        assert (found.slot_mapping_np is before[0]) == (found.attention is before[1])
        before[:] = found.slot_mapping_np, found.attention
        return found.slot_mapping_np

    first = slots(batch)
    assert slots(batch) is first
    for count in (0, 1):
        lag = PositionLag(mx.array([count, 0], mx.int32), np.array([count, 0], np.int32))
        assert slots(replace(batch, lag=lag, positions=batch.positions - count)) is not first
    again = slots(batch)
    tables_np[requests["long"].req_idx, 1] += 1
    assert slots(batch) is not again
    requests.num_computed_tokens_np[requests["long"].req_idx] = 17
    slots(prepare(requests, {"long": 20, "short": 3}, mx.zeros(4, mx.int32)))
