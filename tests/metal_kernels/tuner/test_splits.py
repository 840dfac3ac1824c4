# SPDX-License-Identifier: Apache-2.0
"""A part's cost and the concurrency follow from six timings of one context."""

from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import pytest

from metal_kernels import kernel
from metal_kernels.paged_attention import AttentionShape, Splits, Tiles
from metal_kernels.selfcheck import Case
from metal_kernels.tuner import splits
from metal_kernels.tuner.choice import Chosen, Layer
from metal_kernels.tuner.splits import LongContext
from metal_kernels.tuner.stopwatch import Timing
from tests.metal_kernels.tuner.fakes import Machine, Once

CONTEXT = LongContext(32768, 8)
LENGTHS = [1 << power for power in range(6, 16)]


def simulated(length: int, planted: Splits) -> float:
    """Keys' time until the last of the equal parts ends, each taken by the first slot that is free.

    And then a reduction, which walks a row's parts.
    """
    slots = [0.0] * planted.slots
    parts = -(-CONTEXT.keys // length)
    for _ in range(parts * CONTEXT.heads):
        first = slots.index(min(slots))
        slots[first] += length + planted.part_cost
    return max(slots) + 20 + parts


def length_of(chosen: Splits) -> int:
    """Returns the part length that the rule gives such a context."""
    share = CONTEXT.keys * CONTEXT.heads / chosen.slots
    best = (chosen.part_cost * share) ** 0.5
    return min(LENGTHS, key=lambda length: abs(length / best - best / length))


def search(machine: Machine, planted: Splits, cores: int | None, current: Splits) -> Chosen:
    def measure(candidate: Splits) -> Timing:
        length = candidate.fixed or length_of(candidate)
        return machine.time(candidate, 1e-7 * simulated(length, planted))

    return splits.search(measure, CONTEXT, cores, current)


@pytest.mark.parametrize("planted", [(16, 20), (48, 60), (128, 30), (192, 160), (8, 10)])
def test_a_quiet_machine_shows_what_was_planted(planted):
    cost, slots = planted
    seen = {
        length: 1e-7 * simulated(length, Splits(part_cost=cost, slots=slots)) for length in LENGTHS
    }
    candidates = [
        Splits(part_cost=c, slots=s) for c in (8, 16, 48, 128, 192) for s in (10, 20, 30, 60, 160)
    ]
    found = splits.fitted(seen, CONTEXT, candidates)
    assert (found.part_cost, found.slots) == planted


@pytest.mark.parametrize(("cost", "slots"), [(24, 160), (192, 60), (256, 80), (6, 20)])
@pytest.mark.parametrize("current", [Splits(24, 60), Splits(6, 160), Splits(256, 20)], ids=str)
def test_in_noise_what_is_chosen_is_as_quick_as_the_planted_optimum(cost, slots, current):
    planted = Splits(part_cost=cost, slots=slots)
    best = min(simulated(length, planted) for length in LENGTHS)
    before = simulated(length_of(current), planted) / best
    for seed in range(2):
        machine = Machine(seed, noise=0.1)
        found = search(machine, planted, 20, current)
        chosen = replace(current, **{k: v for k, v in found.values.items() if v is not None})
        assert simulated(length_of(chosen), planted) <= best * max(1.1, min(before, 1.2))
        assert len(machine.stopwatch.timings) <= 24


def test_what_does_not_pay_is_left_as_it_is():
    for seed in range(4):
        current = Splits.of_gpu(20)
        found = search(Machine(seed, noise=0.1), current, 20, current)
        assert found == Chosen({"part_cost": None, "slots": None}, 1.0)


def test_the_parts_of_a_layer_are_timed_by_their_lengths():
    """Interpreted."""
    case = Case(AttentionShape(2, 1, 64, 64), mx.float16, mx.float16, 16)
    layer = Layer(case, Tiles.for_layer(case.shape), cores=8, context=512)
    assert splits.CHOICE.wanted(layer) and not splits.CHOICE.of_layer
    assert not splits.CHOICE.wanted(replace(layer, case=replace(case, window=100)))
    stopwatch = Once()
    with kernel.using(metal_interpreter.metal_kernel):
        chosen = splits.CHOICE.search(layer, stopwatch)
    assert set(chosen.values) == {"part_cost", "slots"}
    assert 2 <= len(stopwatch.timings) <= 6
    for length in (16, 64):
        assert any(f"fixed={length}," in timing.variant for timing in stopwatch.timings)
