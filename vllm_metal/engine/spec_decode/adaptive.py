# SPDX-License-Identifier: Apache-2.0
"""Limits each request's drafts by their expected gain and the time that verifying them costs."""

from __future__ import annotations

import math

import numpy as np

# Chosen by simulation: tests/engine/spec_decode/test_adaptive.py has machines and acceptances.
PROBE_INTERVAL = 8  # least steps between drafts that probe a request which gets none
PROBE_COST = 0.01  # most of a step's time that those may take; makes them rarer in large batches
MEMORY = 0.97  # of a request's acceptance, per draft: the last 30 or so count
IDLE_MEMORY = 0.98  # of the same, per step in which the request gets no draft
OVERALL_MEMORY = 0.98  # of all requests' acceptance, per draft
PRIOR_DRAFTS = 8.0  # how many drafts the acceptance of all requests counts for in each
STEP_MEMORY = 0.95  # of a step's time, per step
SLOPE_MEMORY = 0.99  # of how time grows with rows, per step of an unusual number of rows
FIXED_ROWS = 32.0  # rows that cost as much as a step does without any, until it is measured
GUESS_WEIGHT = 64.0  # what that guess counts for, as a sum of squared differences in rows


class DraftLengths:
    """Limits the drafts of each request; this base class always allows K, whatever is observed."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._trials = self._hits = 0.0  # of all requests: drafts verified, drafts accepted

    def limits(self, req_indices_np: np.ndarray, num_rows_other: int) -> np.ndarray:
        """Returns the most drafts for each of the R requests that sample in the next step.

        Args:
            req_indices_np: [R] req_idx of each request.
            num_rows_other: the step's scheduled tokens apart from those R and their drafts.

        Returns:
            [R] int32, from 0 to K.
        """
        return np.full(len(req_indices_np), self._num_drafts, np.int32)

    def observe_drafts(
        self, req_indices_np: np.ndarray, drafted_np: np.ndarray, accepted_np: np.ndarray
    ) -> None:
        """Records the drafts of R requests in a step: [R] verified and [R] accepted."""
        num_accepted = int(accepted_np.sum())
        self._hits += num_accepted
        self._trials += num_accepted + np.count_nonzero(accepted_np < drafted_np)

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Records the duration of a step in which all requests decode.

        Args:
            num_rows: tokens of the step, drafts included.
            seconds: since the end of the step before, without compiling or loading.
        """

    def forget_request(self, req_idx: int) -> None:
        """Drops what is recorded of a finished request, whose req_idx may be used again."""

    def acceptance(self) -> float:
        """Share of drafts accepted lately, not counting drafts that follow a rejected one."""
        return self._hits / self._trials if self._trials else 0.0


class AdaptiveDraftLengths(DraftLengths):
    """Chooses the numbers of drafts that yield the most tokens per second of the whole step.

    A request whose drafts are each accepted with probability p, if all before were, gains p^i
    tokens by its i-th draft; a draft costs one token's share of the step. Drafts are added by
    falling gain while (tokens sampled) / (step time) rises. That finds the maximum, since gains
    fall and costs are equal. The step time is `a + b * tokens`, fitted to this machine's steps.
    """

    def __init__(self, num_drafts: int, max_num_reqs: int) -> None:
        super().__init__(num_drafts)
        # By req_idx, decaying sums over drafts that were verified: how many, how many accepted.
        self._trials_np = np.zeros(max_num_reqs)
        self._hits_np = np.zeros(max_num_reqs)
        self._idle_np = np.full(max_num_reqs, PROBE_INTERVAL)  # steps since the last draft
        self._promising_np = np.zeros(max_num_reqs, bool)  # all drafts of the last step accepted
        self._trials, self._hits = 1.0, 0.5  # of all requests; to start with, as if one in two
        self._time = _StepTime()

    def limits(self, req_indices_np: np.ndarray, num_rows_other: int) -> np.ndarray:
        num_reqs = len(req_indices_np)
        if not num_reqs:
            return np.zeros(0, np.int32)
        hits = self._hits_np[req_indices_np] + PRIOR_DRAFTS * self.acceptance()
        rates = hits / (self._trials_np[req_indices_np] + PRIOR_DRAFTS)
        gains = rates[:, None] ** np.arange(1, self._num_drafts + 1)  # [R, K], falling along K
        order = np.argsort(-gains, axis=None, kind="stable")
        tokens = num_reqs + np.concatenate([[0.0], np.cumsum(gains.ravel()[order])])
        base, row = self._time.seconds(num_reqs + num_rows_other), self._time.row()
        num_taken = int(np.argmax(tokens / (base + row * np.arange(len(tokens)))))
        taken = order[:num_taken] // self._num_drafts
        limits = np.bincount(taken, minlength=num_reqs).astype(np.int32)
        self._probe(req_indices_np, limits, base / row)
        return limits

    def _probe(self, req_indices_np: np.ndarray, limits: np.ndarray, rows_per_step: float) -> None:
        """Gives one draft to requests that have had none for long, the longest idle first."""
        none = limits == 0
        forgotten = np.where(none, IDLE_MEMORY, 1.0)
        self._trials_np[req_indices_np] *= forgotten
        self._hits_np[req_indices_np] *= forgotten
        self._idle_np[req_indices_np] = np.where(none, self._idle_np[req_indices_np] + 1, 0)
        num_none = int(none.sum())
        interval = max(PROBE_INTERVAL, math.ceil(num_none / (PROBE_COST * rows_per_step)))
        idle = self._idle_np[req_indices_np]
        due = np.flatnonzero(none & (idle >= interval))
        due = due[np.argsort(-idle[due], kind="stable")][: math.ceil(num_none / interval)]
        # A request whose probe was accepted is probed again at once: the probe paid for itself.
        due = np.concatenate([due, np.flatnonzero(none & self._promising_np[req_indices_np])])
        limits[due] = 1
        self._idle_np[req_indices_np[due]] = 0
        self._promising_np[req_indices_np] = False

    def observe_drafts(
        self, req_indices_np: np.ndarray, drafted_np: np.ndarray, accepted_np: np.ndarray
    ) -> None:
        trials = _trials(drafted_np, accepted_np)
        kept = MEMORY**trials
        self._trials_np[req_indices_np] = kept * self._trials_np[req_indices_np] + trials
        self._hits_np[req_indices_np] = kept * self._hits_np[req_indices_np] + accepted_np
        self._promising_np[req_indices_np] = (drafted_np > 0) & (accepted_np == drafted_np)
        total = float(trials.sum())
        remembered = OVERALL_MEMORY**total
        self._trials = remembered * self._trials + total
        self._hits = remembered * self._hits + float(accepted_np.sum())

    def observe_step(self, num_rows: int, seconds: float) -> None:
        self._time.observe(num_rows, seconds)

    def forget_request(self, req_idx: int) -> None:
        self._trials_np[req_idx] = self._hits_np[req_idx] = 0.0
        self._idle_np[req_idx] = PROBE_INTERVAL
        self._promising_np[req_idx] = False


def _trials(drafted_np: np.ndarray, accepted_np: np.ndarray) -> np.ndarray:
    """[R] drafts of each request that verification judged: the accepted and the first rejected."""
    return accepted_np + (accepted_np < drafted_np)


class _StepTime:
    """Models a step's seconds as a linear function of its tokens, fitted to noisy measurements.

    Keeps running means, and the slope of the deviations from them. Only steps with more or fewer
    tokens than usual change the slope.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0  # means
        self._num_steps = 0
        self._variance = self._covariance = 0.0  # of rows, and of rows and seconds
        self._spread = 0.0  # mean absolute error of the line

    def row(self) -> float:
        """Seconds that one more token takes."""
        if not self._num_steps:
            return 1.0 / (1.0 + FIXED_ROWS)
        guess = self._seconds / (self._rows + FIXED_ROWS)
        # The guess counts as evidence, so that noise in the first steps makes no slope.
        slope = (self._covariance + GUESS_WEIGHT * guess) / (self._variance + GUESS_WEIGHT)
        return min(max(slope, 0.01 * guess), self._seconds / self._rows)

    def seconds(self, num_rows: int) -> float:
        """Estimated seconds of a step with `num_rows` tokens."""
        if not self._num_steps:
            return 1.0
        return max(self._seconds + self.row() * (num_rows - self._rows), 1e-3 * self._seconds)

    def observe(self, num_rows: int, seconds: float) -> None:
        if not self._num_steps or seconds < 0.4 * self.seconds(num_rows):
            # Far faster than the line allows: something held up the steps before.
            self._num_steps, self._rows, self._seconds = 1, float(num_rows), seconds
            self._variance = self._covariance = 0.0
            self._spread = 0.05 * seconds
            return
        self._num_steps += 1
        weight = max(1.0 - STEP_MEMORY, 1.0 / self._num_steps)
        expected = self.seconds(num_rows)
        more_rows = num_rows - self._rows
        # Clips the error of a step that was held up. The limit grows with the distance from the
        # mean rows, where the line itself may be wrong.
        most = 3.0 * self._spread + self.row() * abs(more_rows)
        error = min(max(seconds - expected, -most), most)
        more_seconds = expected + error - self._seconds
        if abs(more_rows) > 0.25:
            # However far off, a step counts for at most a fifth of the evidence.
            most = 0.25 * (self._variance + GUESS_WEIGHT)
            share = min(1.0, most / more_rows**2)
            self._variance = SLOPE_MEMORY * self._variance + share * more_rows**2
            self._covariance = SLOPE_MEMORY * self._covariance + share * more_rows * more_seconds
        self._spread += (1.0 - STEP_MEMORY) * (abs(error) - self._spread)
        self._rows += weight * more_rows
        self._seconds += weight * more_seconds
