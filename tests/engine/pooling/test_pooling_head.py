# SPDX-License-Identifier: Apache-2.0
"""Rows of a step that leave the device, and results of vLLM's poolers."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.batch.test_requests import new_request
from vllm import PoolingParams
from vllm.config.pooler import PoolerConfig

from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.pooling.all_rows import AllRows
from vllm_metal.engine.pooling.pooling_head import PoolingHead
from vllm_metal.patches.vllm_patches.step_result import NOT_A_NUMBER

HIDDEN = 8


class Named(AllRows):
    """Returns rows unchanged and records its arguments; may require tokens."""

    def __init__(self, wants_tokens=False):
        super().__init__()
        self.wants_tokens, self.told = wants_tokens, []

    def get_pooling_updates(self, task):
        updates = super().get_pooling_updates(task)
        return type(updates)(requires_token_ids=self.wants_tokens)

    def forward(self, hidden_states, pooling_metadata):
        self.told.append((hidden_states, pooling_metadata))
        return super().forward(hidden_states, pooling_metadata)


class Steps:
    """Requests by name with given numbers of tokens, through a PoolingHead."""

    def __init__(self, tasks, pooling="LAST", pooler=None):
        self.requests = Requests(4, 64, BlockTables(1, 4, 5))
        self.pooler = pooler or Named()
        config = PoolerConfig(seq_pooling_type=pooling, tok_pooling_type="ALL")
        self.end = PoolingHead(self.pooler, config, self.requests)
        for name, (task, num_tokens) in tasks.items():
            data = new_request(name, list(range(num_tokens)), ([2, 4, 6],))
            data.sampling_params, data.pooling_params = None, PoolingParams(task=task)
            self.end.enter(self.requests.add_request(data))
        self.rng = np.random.default_rng(0)

    def step(self, **counts):
        """Returns results of a step with these row counts, and its [T, H] hidden states."""
        batch = prepare(self.requests, counts, mx.zeros(4, mx.int32))
        hidden = self.rng.normal(size=(sum(counts.values()), HIDDEN)).astype(np.float32)
        self.end.begin(batch, mx.array(hidden[:, None]))
        output, arrays = self.end.finish(None)
        mx.eval(arrays)
        for name, count in counts.items():
            self.requests.num_computed_tokens_np[self.requests[name].req_idx] += count
        assert [array.shape for array in arrays] == [arrays[0].shape]
        self.num_rows = len(arrays[0])
        return output.get_output(), hidden


@pytest.mark.parametrize(("pooling", "row"), [("LAST", -1), ("CLS", 0)])
def test_one_row_of_a_text_leaves_the_device(pooling, row):
    steps = Steps({"a": ("embed", 6), "b": ("classify", 3)}, pooling)
    result, hidden = steps.step(a=6, b=3)
    assert steps.num_rows == 2
    assert result.sampled_token_ids == [[], []]
    for found, rows in zip(result.pooler_output, (hidden[:6], hidden[6:]), strict=True):
        np.testing.assert_array_equal(found[0], rows[row])


def test_a_chunk_that_ends_no_text_gives_nothing():
    steps = Steps({"a": ("embed", 6), "b": ("embed", 9)})
    result, _ = steps.step(a=4, b=5)
    assert (steps.num_rows, result.pooler_output) == (0, [None, None])
    result, hidden = steps.step(a=2, b=3)
    assert steps.num_rows == 1
    np.testing.assert_array_equal(result.pooler_output[0][0], hidden[1])
    assert result.pooler_output[1] is None


def test_chunks_of_a_text_of_which_all_rows_count():
    """Beside a text that needs one row."""
    steps = Steps({"a": ("token_embed", 7), "b": ("embed", 5)})
    first, early = steps.step(a=4, b=5)
    assert first.pooler_output[0] is None
    np.testing.assert_array_equal(first.pooler_output[1][0], early[-1])
    second, late = steps.step(a=3)
    np.testing.assert_array_equal(second.pooler_output[0], np.concatenate([early[:4], late]))
    told = [metadata.get_pooling_cursor() for _, metadata in steps.pooler.told]
    assert [cursor.prompt_lens_cpu.tolist() for cursor in told] == [[7, 1], [7]]
    assert [cursor.seq_lens_cpu.tolist() for cursor in told] == [[4, 1], [7]]


def test_a_pooler_that_wants_tokens_gets_all_rows_and_tokens():
    steps = Steps({"a": ("embed", 4), "b": ("embed", 2)}, pooler=Named(wants_tokens=True))
    steps.step(a=4, b=2)
    ((rows, metadata),) = steps.pooler.told
    assert rows.shape == (6, HIDDEN)
    expected = [torch.arange(4), torch.arange(2)]
    for found, tokens in zip(metadata.get_prompt_token_ids_cpu(), expected, strict=True):
        assert found.tolist() == tokens.tolist()


def test_a_mean_is_of_all_rows():
    steps = Steps({"a": ("embed", 4)}, "MEAN")
    result, hidden = steps.step(a=4)
    np.testing.assert_array_equal(result.pooler_output[0], hidden)


def test_a_request_whose_rows_are_no_numbers_fails_alone():
    steps = Steps({"a": ("embed", 2), "b": ("embed", 2)})
    batch = prepare(steps.requests, {"a": 2, "b": 2}, mx.zeros(4, mx.int32))
    steps.end.begin(batch, mx.array([1.0, float("nan"), 1.0, 2.0])[:, None, None])
    output, arrays = steps.end.finish(None)
    mx.eval(arrays)
    result = output.get_output()
    assert result.failures == {"a": NOT_A_NUMBER}
    assert result.pooler_output[0] is None
    assert result.pooler_output[1].tolist() == [[2.0]]


def test_sixteen_bits_reach_the_pooler_in_float32():
    steps = Steps({"a": ("embed", 1)})
    batch = prepare(steps.requests, {"a": 1}, mx.zeros(4, mx.int32))
    steps.end.begin(batch, mx.array([[[1 / 3]]], mx.bfloat16))
    output, _ = steps.end.finish(None)
    found = output.get_output().pooler_output[0]
    assert found.dtype == torch.float32
    assert found.item() == np.array(mx.array(1 / 3, mx.bfloat16).astype(mx.float32))


def test_a_request_that_left_keeps_nothing():
    steps = Steps({"a": ("token_embed", 4)})
    steps.step(a=2)
    state = steps.requests.preempt_request("a")
    steps.end.leave(state.req_idx)
    steps.end.enter(steps.requests.resume_request("a", list(range(4)), ([3],), 0))
    result, hidden = steps.step(a=4)
    np.testing.assert_array_equal(result.pooler_output[0], hidden)
