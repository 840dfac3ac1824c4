# SPDX-License-Identifier: Apache-2.0
"""Both ways for prompts through states compute the same, and are timed in turn."""

from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import kernel
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.selfcheck import Case, Check, Outcome, StateKind, next_check, state_timing
from tests.metal_kernels.selfchecks import in_use

CASE = Case(
    AttentionShape(4, 2, 64, 64),
    mx.float32,
    mx.float32,
    16,
    kernels=("recurrence", "recurrence_way"),
    states=StateKind((2, 64, 4, 32), delta=True, channels=24),
)


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


@pytest.mark.parametrize(
    "cache",
    [
        mx.bfloat16,
        pytest.param(mx.int8, marks=pytest.mark.more),
        pytest.param(mx.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_both_ways_do_the_same(monkeypatch, cache):
    found = []
    for way in range(2):

        def in_turn(ways, calls, clock, way=way):
            fence = mx.zeros(8, mx.uint32)
            for _ in range(2):  # the second goes on from the state of the first
                fence, out = ways[way](fence)
                found.append(np.array(out).reshape(40, 4, 32))
            return iter([1.0, 2.0])

        monkeypatch.setattr(state_timing, "in_turn", in_turn)
        times = state_timing.compare(replace(CASE, cache_dtype=cache), [40])
        assert times == {"metal": {"1 x 40": 1.0}, "mlx": {"1 x 40": 2.0}}
    assert not np.allclose(found[0], found[1], atol=1e-3)
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_median_of_rounds_in_turn_counts():
    now, ticks = 0.0, []
    for seconds in (100.0, 100.0, 4.0, 80.0, 8.0, 40.0, 36.0, 120.0, 12.0, 160.0, 16.0, 200.0):
        ticks += [now, now + seconds]
        now += seconds + 7.0
    left = iter(ticks)
    found = state_timing.compare(CASE, [9], lambda: next(left))
    assert next(left, None) is None
    assert found == {"metal": {"1 x 9": 3.0}, "mlx": {"1 x 9": 30.0}}


def test_a_choice_is_left_where_one_way_does_not_exist_or_does_not_work():
    assert in_use(CASE) == ["recurrence", "recurrence_way"]
    assert CASE.states is not None
    for changed in ({"delta": False}, {"decays": "keys"}, {"dtype": mx.bfloat16}, {"heads": None}):
        kind = replace(CASE.states, **changed)
        assert "recurrence_way" not in in_use(replace(CASE, states=kind))
    assert "recurrence_way" not in in_use(replace(CASE, states=None))
    for ok, following in ((True, Check("recurrence_way")), (False, None)):
        assert next_check(CASE, [Outcome("recurrence", CASE, ok)]) == following
