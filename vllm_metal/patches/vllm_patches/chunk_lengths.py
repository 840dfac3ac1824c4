# SPDX-License-Identifier: Apache-2.0
"""Measures how long a prefill chunk may be while other requests decode."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# Chosen by simulation: the machines of tests/patches/vllm_patches/test_chunk_lengths.py.
DECODE_FACTOR = 2.0  # a step with a chunk may take this many times as long as a decode-only step
GRADUAL, AT_ONCE = 0.5, 1.0  # weights of the newest measurement, on a logarithmic scale
MOST_CHANGE = 2.0  # largest factor by which one measurement changes a value
NEAR = 0.5  # chunks shorter than this share of the limit say little about a chunk at the limit
PROBE_INTERVAL = 64  # steps with a chunk after which one decode-only step is measured
PROBE_PATIENCE = 4  # steps until a probe is requested again; one or two steps are in flight
ENOUGH = 3  # decode-only measurements needed, with as many rows, before chunks take priority
CONTEXT_UNIT = 256  # tokens; shorter contexts all cost about the same


@dataclass(frozen=True)
class StepWork:
    """Numbers of tokens that one step, or several in a row, compute."""

    decode_rows: int = 0  # rows of decoding requests, drafts included
    prefill_tokens: int = 0  # tokens of all chunks
    context_sum: int = 0  # sum over prefill tokens of the tokens before their chunk

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.decode_rows + other.decode_rows,
            self.prefill_tokens + other.prefill_tokens,
            self.context_sum + other.context_sum,
        )

    @property
    def context(self) -> int:
        """Tokens before a chunk, averaged over prefill tokens."""
        return self.context_sum // max(1, self.prefill_tokens)


class ChunkLengths:
    """Limits the prefill tokens of a step so that the step stays within its time bound."""

    # The bound is `max_step_s`, or twice the time of a decode-only step if that is longer: a slow
    # device would otherwise hardly prefill at all. Two tables follow the measured steps: the time
    # of a decode-only step by its rows, and the time that a prefill token adds by the context
    # before it. The second is measured at the current chunk length, so it includes costs that do
    # not depend on the length, and the limit converges to a step that takes as long as its bound,
    # as long as those costs leave room for a token at all.
    # While prompts are always being prefilled, no step would be decode-only. One is made so now
    # and then, to keep its time known.

    def __init__(self, max_step_s: float, shortest: int) -> None:
        """Takes the bound in seconds and the least limit in tokens, which guarantees progress."""
        self._max_step_s = max_step_s
        self._shortest = shortest
        # Steps are sometimes delayed but never hurried: these weights err towards short chunks.
        self._decode_s = _ByMagnitude(GRADUAL, AT_ONCE)  # per step, by decode rows
        self._token_s = _ByMagnitude(AT_ONCE, GRADUAL)  # per prefill token, by context
        self._since_decode_only = self._since_probe = PROBE_INTERVAL

    def limit(self, decode_rows: int, context: int) -> int | None:
        """Returns the most prefill tokens for the next step, which also decodes; None: no limit.

        `decode_rows` is the number of decode tokens, `context` the tokens before the next chunk.
        Returns 0 if a decode-only step is due, to measure its time, and None before measurements.
        """
        self._since_decode_only += 1
        self._since_probe += 1
        if not self._token_s:
            return None
        known = self._decode_s.num_measured(decode_rows) >= ENOUGH
        due = not known or self._since_decode_only > PROBE_INTERVAL
        if due and self._since_probe > PROBE_PATIENCE:
            self._since_probe = 0
            return 0
        return self._within_bound(decode_rows, context)

    def _within_bound(self, decode_rows: int, context: int) -> int:
        decode_s = self._decode_s.at(decode_rows) or 0.0
        token_s = self._token_s.at(context // CONTEXT_UNIT)
        assert token_s is not None
        return max(self._shortest, int((self._bound(decode_s) - decode_s) / token_s))

    def _bound(self, decode_s: float) -> float:
        return max(self._max_step_s, DECODE_FACTOR * decode_s)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Records how long a step took.

        Args:
            work: the step's work, or the sum over several steps without decode rows.
            seconds: since the end of the previous step; positive.
        """
        if not work.prefill_tokens:
            self._decode_s.follow(work.decode_rows, seconds, begin=seconds)
            self._since_decode_only = 0
            return
        units, per_token = work.context // CONTEXT_UNIT, seconds / work.prefill_tokens
        if not work.decode_rows:
            # The cost per token of a long chunk is only a first guess for shorter ones.
            if not self._token_s.num_measured(units):
                self._token_s.follow(units, per_token, begin=per_token)
            return
        value = self._token_s.at(units)
        if value is None:
            self._token_s.follow(units, per_token, begin=per_token)
            return
        decode_s = self._decode_s.at(work.decode_rows) or 0.0
        limit = self._within_bound(work.decode_rows, work.context)
        if work.prefill_tokens >= NEAR * limit or seconds > self._bound(decode_s):
            added = max(seconds - decode_s, 0.0)
            # Noise can make the difference of two times tiny: start from the known value.
            self._token_s.follow(units, added / work.prefill_tokens, begin=value)


class _ByMagnitude:
    """Values that follow measurements, one for each power of two of the measured size."""

    def __init__(self, rise: float, fall: float) -> None:
        """Takes the weights of measurements above and below the value."""
        self._values: dict[int, float] = {}
        self._num_measured: Counter[int] = Counter()
        self._rise, self._fall = rise, fall

    def __bool__(self) -> bool:
        return bool(self._values)

    def num_measured(self, size: int) -> int:
        return self._num_measured[size.bit_length()]

    def at(self, size: int) -> float | None:
        """Returns the value of the nearest measured magnitude, or None if nothing was measured."""
        if not self._values:
            return None
        magnitude = size.bit_length()
        return self._values[min(self._values, key=lambda known: (abs(known - magnitude), known))]

    def follow(self, size: int, measured: float, begin: float) -> None:
        """Moves this magnitude's value towards a measurement; a first value starts at `begin`."""
        magnitude = size.bit_length()
        self._num_measured[magnitude] += 1
        value = self._values.setdefault(magnitude, begin)
        change = min(max(measured / value, 1.0 / MOST_CHANGE), MOST_CHANGE)
        self._values[magnitude] = value * change ** (self._rise if change > 1.0 else self._fall)
