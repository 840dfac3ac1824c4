# SPDX-License-Identifier: Apache-2.0
"""Windows of fixed time after a warm-up; unsteady machines are rejected."""

import metal_interpreter
import mlx.core as mx
import pytest

from metal_kernels import kernel
from metal_kernels.tuner.stopwatch import Stopwatch, Timing, Unsteady
from tests.metal_kernels.tuner.fakes import Machine, Once


@pytest.mark.parametrize("seconds", [3e-6, 1e-3, 2.0])
def test_five_windows_of_fixed_time_count_whatever_a_call_takes(seconds):
    ran: list[tuple[float, int]] = []
    machine = Machine()
    stopwatch = Stopwatch(clock=lambda: machine.now)

    def run(count: int) -> None:
        ran.append((machine.now, count))
        machine.now += count * seconds

    timing = stopwatch.time("variant", run)
    assert timing.windows == pytest.approx([seconds] * 5)
    first = next(index for index, (now, _) in enumerate(ran) if now >= seconds + 1.0)
    timed = sum(count for _, count in ran[first:]) * seconds
    assert max(5 * 0.4, 5 * seconds) <= timed <= max(5 * 0.4, 5 * seconds) + 5 * 0.06 + seconds
    # No batch is so long that macOS might end the process for it.
    assert max(count for _, count in ran) * seconds <= max(0.06, seconds)
    assert stopwatch.timings == [timing]


def test_the_gpu_is_warmed_up_by_the_clock_and_again_after_a_pause():
    machine = Machine()

    def warmed() -> float:
        before = machine.now
        machine.time("variant", 1e-3)
        return machine.now - before - 5 * 0.05

    assert warmed() == pytest.approx(1.0, abs=0.1)
    assert warmed() == pytest.approx(0.2, abs=0.1)
    machine.now += 60.0
    assert warmed() == pytest.approx(1.0, abs=0.1)


def test_one_window_that_something_else_spoils_does_not_count():
    timing = Timing("variant", (1.0, 1.1, 9.0, 1.0, 0.9))
    assert Stopwatch().keep(timing).seconds == 1.0


def test_a_busy_machine_is_refused():
    with pytest.raises(Unsteady, match=r"decode took 1000000 µs to 1400000 µs .* something else"):
        Stopwatch().keep(Timing("decode", (1.0, 1.4, 1.0, 1.5, 1.0)))


def test_a_machine_that_slows_down_is_refused():
    machine = Machine(slower=lambda now: 1 + now / 15)
    machine.time("decode", 1e-3)
    machine.time("other", 1e-3)
    with pytest.raises(
        Unsteady, match=r"decode took \d+ µs first, and \d+ µs later: .* hot, or busy"
    ):
        for _ in range(20):
            machine.time("decode", 1e-3)


def test_a_machine_that_says_itself_that_it_is_unsteady_is_not_timed():
    def watch() -> None:
        raise Unsteady("on battery")

    with pytest.raises(Unsteady, match="on battery"):
        Stopwatch(watch).time("variant", lambda count: pytest.fail("it was timed"))


def test_calls_take_the_fence_of_the_one_before():
    fences = []

    def call(fence: mx.array) -> list[mx.array]:
        fences.append(fence)
        return [fence + 1]

    with kernel.using(metal_interpreter.metal_kernel):
        Once().time_call("variant", call)
    # A call that compiles, a warm-up and five windows, each from zero.
    assert len(fences) >= 7 and all(fence.tolist() == [0] * fence.size for fence in fences[:1])
