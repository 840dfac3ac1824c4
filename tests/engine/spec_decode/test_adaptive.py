# SPDX-License-Identifier: Apache-2.0
"""Simulated machines with steps of `a + b * rows`, and texts of known acceptance."""

from dataclasses import dataclass

import numpy as np
import pytest
from engine.models.cases import cases

from vllm_metal.engine.spec_decode.adaptive import (
    PROBE_INTERVAL,
    AdaptiveDraftLengths,
    DraftLengths,
)

K = 8
MACHINES = {"gpu": (0.020, 0.0002), "cpu": (0.055, 0.005)}  # seconds a step, and a row of it


@dataclass
class Machine:
    base: float
    row: float

    def rate(self, lengths, acceptance):
        """Returns expected tokens per second for each request's number of drafts."""
        drafts = np.arange(1, K + 1)
        gains = (acceptance[:, None] ** drafts * (drafts <= lengths[:, None])).sum()
        return len(lengths) + gains, self.base + self.row * (len(lengths) + lengths.sum())

    def best_fixed(self, acceptance):
        options = (self.rate(np.full(len(acceptance), k), acceptance) for k in range(K + 1))
        return max(tokens / seconds for tokens, seconds in options)

    def best_of_two(self, acceptance, first):
        """Returns the best rate if requests `first` have one length and all others another."""
        pairs = ((k, m) for k in range(K + 1) for m in range(K + 1))
        options = (self.rate(np.where(first, k, m), acceptance) for k, m in pairs)
        return max(tokens / seconds for tokens, seconds in options)

    def plain(self, num_reqs):
        return num_reqs / (self.base + self.row * num_reqs)

    def run(self, lengths, acceptance, num_steps, skip=0, seed=0):
        """Runs `lengths`, and returns expected tokens per second from step `skip` on.

        Steps are up to some 10 % slower than the line says, and one in 100 three times as slow.
        """
        rng, num_reqs = np.random.default_rng(seed), len(acceptance)
        req_indices, all_tokens, all_seconds = np.arange(num_reqs), 0.0, 0.0
        for step in range(num_steps):
            limits = lengths.limits(req_indices, 0)
            assert limits.dtype == np.int32 and min(limits) >= 0 and max(limits) <= K
            good = rng.random((num_reqs, K)) < acceptance[:, None]
            accepted = np.cumprod(good & (np.arange(K) < limits[:, None]), axis=1).sum(1)
            tokens, seconds = self.rate(limits, acceptance)
            slowness = 1 + 0.05 * abs(rng.standard_normal()) + 2 * (rng.random() < 0.01)
            lengths.observe_drafts(req_indices, limits, accepted)
            lengths.observe_step(num_reqs + int(limits.sum()), seconds * slowness)
            if step >= skip:
                all_tokens, all_seconds = all_tokens + tokens, all_seconds + seconds
        return all_tokens / all_seconds


@pytest.fixture(params=MACHINES.values(), ids=MACHINES)
def machine(request):
    return Machine(*request.param)


def batches(*quick):
    """Returns batch sizes, all but some of them marked for the nights."""
    return pytest.mark.parametrize("num_reqs", cases((1, 8, 32, 64), quick))


@batches(1, 32)
@pytest.mark.parametrize("rate", cases((0.0, 0.2, 0.5, 0.8, 0.95), (0.0, 0.5, 0.95)))
def test_within_three_percent_of_the_best_fixed_length(machine, num_reqs, rate):
    """From the first step on, learning included."""
    acceptance = np.full(num_reqs, rate)
    reached = machine.run(AdaptiveDraftLengths(K, num_reqs), acceptance, num_steps=600)
    assert reached > 0.97 * machine.best_fixed(acceptance)
    assert reached > 0.97 * machine.plain(num_reqs)


@batches(8)
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_a_text_that_changes_is_noticed(machine, num_reqs, before, after):
    lengths = AdaptiveDraftLengths(K, num_reqs)
    machine.run(lengths, np.full(num_reqs, before), num_steps=300)
    acceptance = np.full(num_reqs, after)
    at_first = machine.run(lengths, acceptance, num_steps=300, seed=1)
    later = machine.run(lengths, acceptance, num_steps=300, seed=2)
    assert at_first > 0.8 * machine.best_fixed(acceptance)
    assert later > 0.965 * machine.best_fixed(acceptance)


@batches(8)
def test_drafts_go_to_the_requests_that_use_them(machine, num_reqs):
    predictable = np.arange(num_reqs) % 2 == 0
    acceptance = np.where(predictable, 0.9, 0.1)
    reached = machine.run(AdaptiveDraftLengths(K, num_reqs), acceptance, num_steps=600)
    assert reached > 0.95 * machine.best_of_two(acceptance, predictable)
    assert reached > machine.best_fixed(acceptance)


def test_a_request_that_gets_no_drafts_is_probed_at_equal_intervals():
    lengths, machine = AdaptiveDraftLengths(K, 1), Machine(base=0.02, row=0.001)
    machine.run(lengths, np.zeros(1), num_steps=100)
    drafted = []
    for _ in range(4 * PROBE_INTERVAL):
        limits = lengths.limits(np.array([0]), 0)
        lengths.observe_drafts(np.array([0]), limits, np.zeros(1, np.int32))
        drafted.append(int(limits[0]))
    probes = np.flatnonzero(drafted)
    assert max(drafted) == 1
    assert np.diff(probes).tolist() == [PROBE_INTERVAL] * 3


def test_another_request_in_a_request_index_starts_afresh():
    lengths = AdaptiveDraftLengths(K, 2)
    machine = Machine(*MACHINES["gpu"])
    machine.run(lengths, np.array([0.0, 0.95]), num_steps=200)
    req_indices = np.array([0, 1])
    unpredictable, predictable = lengths.limits(req_indices, 0)
    lengths.forget_request(0)
    lengths.forget_request(1)
    first, second = lengths.limits(req_indices, 0)
    assert unpredictable < first == second <= predictable


def test_rows_of_others_make_a_draft_cheaper_by_comparison():
    """In a longer step, a token is relatively cheaper."""
    lengths = AdaptiveDraftLengths(K, 1)
    machine = Machine(*MACHINES["cpu"])
    machine.run(lengths, np.array([0.5]), num_steps=300)
    assert lengths.limits(np.array([0]), 256)[0] > lengths.limits(np.array([0]), 0)[0]


@pytest.mark.parametrize("lengths", [AdaptiveDraftLengths(K, 4), DraftLengths(K)])
def test_acceptance_counts_drafts_whose_fate_was_seen(lengths):
    for _ in range(2000):
        lengths.observe_drafts(np.array([0, 2]), np.array([4, 2]), np.array([3, 2]))
    # Five of six drafts were accepted, one refused, none left in doubt.
    assert lengths.acceptance() == pytest.approx(5 / 6, abs=1e-6)


def test_fixed_lengths():
    lengths = DraftLengths(3)
    assert lengths.acceptance() == 0.0
    lengths.observe_step(4, 0.1)
    lengths.forget_request(0)
    assert lengths.limits(np.array([4, 1]), 7).tolist() == [3, 3]


def test_no_request_no_limit():
    assert AdaptiveDraftLengths(K, 4).limits(np.zeros(0, np.int32), 5).tolist() == []
