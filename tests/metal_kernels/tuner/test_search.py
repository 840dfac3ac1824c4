# SPDX-License-Identifier: Apache-2.0
"""Searches find a planted optimum in 10 % noise, and change nothing without clear gain."""

import pytest

from metal_kernels.tuner.search import best_of, confirmed, duel, fewest
from metal_kernels.tuner.stopwatch import Timing, Unsteady
from tests.metal_kernels.tuner.fakes import Machine

SIZES = (8, 16, 32, 64, 128, 256)


def valley(best: int, step: float = 0.3) -> dict[int, float]:
    """Returns milliseconds by size: a third slower per step away from the best."""
    at = SIZES.index(best)
    return {size: 1e-3 * (1 + step) ** abs(i - at) for i, size in enumerate(SIZES)}


@pytest.mark.parametrize("best", SIZES)
@pytest.mark.parametrize("current", [8, 256])
def test_a_planted_optimum_is_found_in_noise(best, current):
    seconds = valley(best)
    for seed in range(25):
        machine = Machine(seed, noise=0.1)
        found = best_of(lambda size: machine.time(size, seconds[size]), SIZES, current)  # noqa: B023
        assert found.value == best
        assert len(machine.stopwatch.timings) <= 24
        assert found.gain == pytest.approx(seconds[current] / seconds[best], rel=0.15)


@pytest.mark.parametrize("gain", [1.0, 1.02, 1.04])
def test_no_change_under_5_per_cent_is_taken_in_noise(gain):
    """All others are faster by that much, so the best-looking one would be a change."""
    for seed in range(100):
        machine = Machine(seed, noise=0.1)
        found = best_of(
            lambda size: machine.time(size, 1e-3 * (gain if size == 64 else 1.0)),  # noqa: B023
            SIZES,
            64,
        )
        assert (found.value, found.gain) == (64, 1.0)


@pytest.mark.parametrize(("gain", "taken"), [(1.049, False), (1.051, True), (0.5, False)])
def test_a_quiet_machines_changes_count_from_5_per_cent_on(gain, taken):
    machine = Machine()
    found = confirmed(lambda v: machine.time(v, {"a": gain, "b": 1.0}[v] * 1e-3), "a", "b")
    assert found.value == ("b" if taken else "a")
    assert found.gain == pytest.approx(gain if taken else 1.0)


def test_a_gain_in_one_order_alone_is_none():
    """The clock rises, so the second of a pair is always faster."""
    times = iter([1.3, 1.0, 1.3, 1.2])
    assert not duel(lambda v: Timing(v, (next(times),) * 5), "a", "b").clear
    order = []

    def measure(v: str) -> Timing:
        order.append(v)
        return Timing(v, (1.0,) * 5)

    duel(measure, "a", "b")
    assert order == ["a", "b", "b", "a"]


def test_equal_values_are_not_timed():
    assert confirmed(lambda v: pytest.fail("timed"), 3, 3).value == 3


@pytest.mark.parametrize("first", [*SIZES, None])
def test_the_size_from_which_a_way_wins_is_found_by_halving(first):
    asked = []

    def wins(size: int) -> bool:
        asked.append(size)
        return first is not None and size >= first

    assert fewest(wins, SIZES) == first
    assert len(asked) <= 4 and len(set(asked)) == len(asked)


@pytest.mark.parametrize(
    "slower",
    [lambda now: 1 + now / 10, lambda now: 1.0 + (int(now / 0.07) % 2), lambda now: 1 + (now > 4)],
    ids=["hot", "busy", "on a sudden"],
)
def test_a_search_stops_on_a_hot_or_busy_clock(slower):
    seconds = valley(16)
    machine = Machine(noise=0.1, slower=slower)
    with pytest.raises(Unsteady):
        best_of(lambda size: machine.time(size, seconds[size]), SIZES, 64)


def test_a_machine_that_slowly_warms_up_makes_no_change():
    for seed in range(25):
        machine = Machine(seed, noise=0.03, slower=lambda now: 1 + now / 60)
        found = best_of(lambda size: machine.time(size, 1e-3), SIZES, 8)  # noqa: B023
        assert found.value == 8
