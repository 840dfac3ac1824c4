# SPDX-License-Identifier: Apache-2.0
"""Hidden states arrive unchanged in every dtype; those of another step are rejected."""

from collections import deque
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.distributed.hidden_states import GroupLink, HiddenIn, to_mlx, to_torch
from vllm_metal.engine.models.stage import HIDDEN


class Pipe:
    """Replaces vLLM's group of two ranks."""

    def __init__(self):
        self.sent = deque()

    def isend_tensor_dict(self, tensors):
        self.sent.append(tensors)

    def recv_tensor_dict(self):
        return self.sent.popleft()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_numbers_and_dtypes_stay_as_they_are(dtype):
    given = mx.array(np.random.default_rng(0).standard_normal((3, 2, 5))).astype(dtype)
    found = to_mlx(to_torch(given))
    assert found.dtype == dtype and found.shape == given.shape
    assert mx.array_equal(found, given).item()
    assert str(to_torch(given).dtype).removeprefix("torch.") == str(dtype).removeprefix("mlx.core.")


def test_steps_arrive_in_their_order_as_inputs_of_a_forward():
    pipe = Pipe()
    before, after = GroupLink(pipe), HiddenIn(GroupLink(pipe))
    steps = [mx.full((rows, 4), rows) for rows in (2, 3)]
    for each in steps:
        before.send(each)
    for each in steps:
        count = len(each)
        rows = SimpleNamespace(positions_np=np.arange(count))
        inputs = ForwardInputs(mx.zeros(count, mx.int32), mx.zeros((1, count), mx.int32))
        extras = dict(after.inputs(rows, inputs).extras)
        assert mx.array_equal(extras[HIDDEN], each).item()


def test_a_step_that_was_left_out_is_an_error():
    pipe = Pipe()
    before, after = GroupLink(pipe), GroupLink(pipe)
    before.send(mx.zeros((1, 4)))
    before.send(mx.zeros((1, 4)))
    pipe.recv_tensor_dict()
    with pytest.raises(RuntimeError, match="sent step 1, expected 0"):
        after.receive()


def test_other_rows_than_this_rank_laid_out_are_an_error():
    pipe = Pipe()
    GroupLink(pipe).send(mx.zeros((2, 4)))
    rows = SimpleNamespace(positions_np=np.arange(3))
    with pytest.raises(RuntimeError, match="sent 2 tokens, expected 3"):
        HiddenIn(GroupLink(pipe)).inputs(rows, None)
