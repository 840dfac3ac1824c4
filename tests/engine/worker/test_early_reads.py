# SPDX-License-Identifier: Apache-2.0
"""When a step's tokens are read before the next submission, by read times."""

from vllm_metal.engine.worker.early_reads import FIRST, MOST, WAIT_S, EarlyReads

QUICK, SLOW = WAIT_S / 10, WAIT_S * 10


class Output:
    """A StepOutput with a fixed read time."""

    sampled = "tokens"

    def __init__(self, seconds):
        self.seconds, self.wait_s, self.checked = seconds, None, False

    def token_ids(self):
        self.wait_s = self.seconds if self.wait_s is None else self.wait_s


class Run:
    """Consecutive steps of a pipelined engine."""

    def __init__(self):
        self.reads, self.newest = EarlyReads(), None

    def step(self, seconds):
        """Returns whether the previous step was read early; `seconds`: read time of the new one."""
        self.reads.before_submit(self.newest, ended=False)
        early = self.newest is not None and self.newest.wait_s is not None
        self.reads.after_submit()
        if self.newest is not None:
            assert self.newest.checked == early
            self.newest.token_ids()
        self.newest = Output(seconds)
        return early

    def num_early(self, seconds, steps):
        return sum(self.step(seconds) for _ in range(steps))


def test_a_host_that_comes_late_reads_early():
    run = Run()
    assert run.num_early(QUICK, FIRST + 1) == 0
    assert run.num_early(QUICK, 100) == 100


def test_a_device_that_comes_late_is_never_waited_for():
    assert Run().num_early(SLOW, 1000) == 0


def test_after_an_early_read_that_waited_twice_as_many_must_be_quick():
    run, needed = Run(), FIRST
    for _ in range(12):
        assert run.num_early(QUICK, needed + 2) <= 2
        assert run.num_early(QUICK, 50) == 50
        run.num_early(SLOW, 4)
        assert run.num_early(SLOW, 50) == 0
        needed = min(2 * needed, MOST)


def test_what_was_waited_for_in_any_case_is_read():
    reads, output = EarlyReads(), Output(SLOW)
    reads.before_submit(output, ended=True)
    assert output.wait_s and not output.checked
    reads.after_submit()
    assert output.checked


def test_a_step_without_tokens_is_not_known_to_have_ended():
    reads, output = EarlyReads(), Output(QUICK)
    output.sampled = None
    reads.before_submit(output, ended=True)
    reads.after_submit()
    assert not output.checked
