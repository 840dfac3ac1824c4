# SPDX-License-Identifier: Apache-2.0
"""Times of steps on the test's clock."""

import pytest

from vllm_metal.metrics.step_clock import StepClock


class Play:
    """An engine with call durations set by the test."""

    def __init__(self):
        self.now = 100.0
        self.clock = StepClock(lambda: self.now)

    def wait(self, seconds):
        self.now += seconds

    def lay_out(self, seconds, waiting=None):
        """Makes the worker's first call; None: it does not wait for the previous step."""
        with self.clock.preparing():
            if waiting is not None:
                with self.clock.waiting():
                    self.wait(waiting)
                self.clock.accepted_known()
            self.wait(seconds)

    def submit(self, seconds):
        with self.clock.submitting() as step:
            self.wait(seconds)
        return step

    def step(self):
        """Runs a step of 3 s on the host, the last 2 s beside the device."""
        self.lay_out(1)
        return self.submit(2)


def test_one_step_at_a_time():
    play = Play()
    for _ in range(3):
        step = play.step()
        play.wait(4)
        assert play.clock.end(step, sampled=True) == 6  # from the begin of the hand-over
        assert step.host_seconds == 3
        play.wait(7)  # for the next request; nobody's time


def test_two_steps_in_flight():
    """The second is handed over while the first runs, so its time starts at the first's end."""
    play = Play()
    first = play.step()
    second = play.step()
    play.wait(5)
    assert play.clock.end(first, sampled=True) == 10
    play.wait(1)
    assert play.clock.end(second, sampled=True) == 1


def test_the_wait_for_drafts_tokens_is_the_devices_time():
    """The host has the first step's tokens while it lays out the second."""
    play = Play()
    first = play.step()
    play.lay_out(1, waiting=8)
    second = play.submit(2)
    assert (first.host_seconds, second.host_seconds) == (3, 3)
    assert play.clock.end(first, sampled=True) == 10
    play.wait(4)
    assert play.clock.end(second, sampled=True) == 6


def test_without_drafts_no_call_tells_when_a_step_is_over():
    play = Play()
    first = play.step()
    play.lay_out(1)
    second = play.submit(2)
    play.wait(3)
    assert play.clock.end(first, sampled=True) == 8
    assert play.clock.end(second, sampled=True) == 0


def test_steps_that_sample_nothing_are_measured_with_the_next():
    play = Play()
    chunks = [play.step() for _ in range(2)]
    assert [play.clock.end(step, sampled=False) for step in chunks] == [None, None]
    last = play.step()
    play.wait(5)
    assert play.clock.end(last, sampled=True) == 2 + 3 + 3 + 5


def test_a_layout_with_nothing_scheduled_is_no_steps_time():
    play = Play()
    play.lay_out(50)
    assert play.step().host_seconds == 3


def test_a_call_that_raises_is_timed_and_leaves_no_step():
    play = Play()
    with pytest.raises(RuntimeError), play.clock.submitting():
        raise RuntimeError
    play.clock.accepted_known()  # there is no step whose tokens could be
    assert play.step().host_seconds == 3


def test_after_a_step_that_failed():
    """The next step's time excludes the lost step and the recovery."""
    play = Play()
    assert play.clock.end(play.step(), sampled=False) is None
    play.wait(60)
    play.clock.drop()
    step = play.step()
    play.wait(1)
    assert play.clock.end(step, sampled=True) == 3
