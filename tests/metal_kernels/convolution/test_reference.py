# SPDX-License-Identifier: Apache-2.0
"""The convolution of a step, against a token-by-token one and MLX's."""

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.convolution import reference
from metal_kernels.sequence_groups import NUM_TAPS, plan
from tests.metal_kernels.sequence_traffic import Request, Traffic, Turn, play, random_turns


class Taps:
    """Outputs the sum over a row's newest inputs."""

    def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
        self.weight, self.bias = weight, bias

    def zero(self):
        return np.zeros((self.weight.shape[1] - 1, self.weight.shape[0]))

    def apply(self, state, row):
        window = np.concatenate([state, row[0][None]])
        return window[1:], (window * self.weight.T).sum(0) + self.bias


def test_steps_equal_a_play_from_token_to_token(seed=0, num_channels=6):
    rng = np.random.default_rng(seed)
    for num_taps in (2, 4, NUM_TAPS):
        weight = rng.normal(size=(num_channels, num_taps)).astype(np.float32)
        bias = rng.normal(size=num_channels).astype(np.float32)
        cell, traffic = Taps(weight.astype(np.float64), bias), Traffic(rng, block_size=4)
        requests, pool, kept = [Request() for _ in range(5)], {}, None
        for number in range(12):
            if number % 4 == 3:
                requests[number % 5] = Request()
            step = traffic.step(requests, random_turns(rng, requests, 90))
            rows = rng.normal(size=(step.num_rows, num_channels)).astype(np.float32)
            garbage = np.full((num_taps - 1, num_channels), np.nan, np.float32)
            states = np.stack([pool.get(request.block, garbage) for request in requests])
            planned = plan(*step.arguments)
            shape = (num_channels, num_taps, 1) if number % 2 else (num_channels, num_taps)
            out, ended, kept = reference.run(
                planned, mx.array(rows), kept, mx.array(weight.reshape(shape)), mx.array(bias),
                mx.array(states),
            )  # fmt: skip
            outputs, ends = play(step, cell, [(row.astype(np.float64),) for row in rows])
            if len(rows):
                np.testing.assert_allclose(np.array(out), np.stack(outputs), atol=1e-5)
            assert sorted(planned.ends_blocks_np.tolist()) == sorted(ends)
            for block, state in zip(planned.ends_blocks_np.tolist(), np.array(ended), strict=True):
                np.testing.assert_array_equal(state, ends[block].astype(np.float32))
                pool[block] = state
            assert len(kept) == step.num_kept


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_whole_text_equals_mlx(dtype, length=70, num_channels=8, num_taps=4):
    mx.random.seed(0)
    rows = mx.random.normal((length, num_channels)).astype(dtype)
    weight = mx.random.normal((num_channels, num_taps, 1)).astype(dtype)
    step = Traffic(np.random.default_rng(0), 1000).step([Request()], [Turn(length)])
    states = mx.zeros((1, num_taps - 1, num_channels), dtype)
    out, ended, _ = reference.run(plan(*step.arguments), rows, None, weight, None, states)
    padded = mx.pad(rows, [(num_taps - 1, 0), (0, 0)])[None]
    expected = mx.conv1d(padded, weight, groups=num_channels)[0]
    assert out.dtype == ended.dtype == dtype
    tolerance = 1e-5 if dtype == mx.float32 else 2e-2
    assert mx.allclose(out, expected, atol=tolerance, rtol=tolerance)
    assert mx.array_equal(ended[0], rows[1 - num_taps :])


def test_what_does_not_fit_the_plan_is_an_error():
    step = Traffic(np.random.default_rng(0), 16).step([Request()], [Turn(3)])
    planned, rows = plan(*step.arguments), mx.zeros((3, 2))
    with pytest.raises(ValueError, match="9 taps"):
        reference.run(planned, rows, None, mx.zeros((2, 9)), None, mx.zeros((1, 8, 2)))
    with pytest.raises(ValueError, match="1 kept rows"):
        reference.run(planned, rows, rows[:1], mx.zeros((2, 4)), None, mx.zeros((1, 3, 2)))
