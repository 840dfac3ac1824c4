# SPDX-License-Identifier: Apache-2.0
"""Learns how long a prefill's chunk may be beside streams."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

# Chosen by simulation: the machines of tests/patches/vllm_patches/test_chunk_lengths.py.
DECODE_FACTOR = 2.0  # a step with a chunk may take so many times as long as one that only decodes
GRADUAL, AT_ONCE = 0.5, 1.0  # weights of the newest measurement, on a logarithmic scale
MOST_CHANGE = 2.0  # factor by which one measurement changes a value, at most
NEAR = 0.5  # chunks of less than this share of the limit tell little about one of the limit
PROBE_INTERVAL = 64  # steps with a chunk after which one only decodes, to be measured
PROBE_PATIENCE = 4  # steps until such a step is asked for again; one or two are in flight
ENOUGH = 3  # measurements of steps that only decode, with as many rows, before chunks come first
CONTEXT_UNIT = 256  # tokens; contexts shorter than this cost alike


@dataclass(frozen=True)
class StepWork:
    """What one step computes, or several in a row."""

    decode_rows: int = 0  # of requests that decode, drafts included
    prefill_tokens: int = 0  # of all chunks
    context_sum: int = 0  # sum over prefill tokens of the tokens before their chunk

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(
            self.decode_rows + other.decode_rows,
            self.prefill_tokens + other.prefill_tokens,
            self.context_sum + other.context_sum,
        )

    @property
    def context(self) -> int:
        """Tokens before a chunk, on average over prefill tokens."""
        return self.context_sum // max(1, self.prefill_tokens)


class ChunkLengths:
    """Limits the prefill tokens of a step so that the step lasts no longer than its bound.

    The bound is `max_step_s`, or twice the time of a step that only decodes where that is longer:
    else a slow device would hardly prefill at all. Two tables follow the measured steps: the time
    of a step that only decodes, by its rows, and what a prefill token adds to it, by the context
    before it. The second is measured at the chunk length in use. So a cost that does not depend on
    the length is counted, too, and the limit settles where a step takes as long as its bound, as
    long as that cost leaves room for a token at all.

    Where prompts are always being prefilled, no step would only decode. One does now and then, so
    that its time is known.
    """

    def __init__(self, max_step_s: float, shortest: int) -> None:
        """
        Args:
            max_step_s: the bound, seconds.
            shortest: the least limit, tokens, so that prefill goes on whatever it costs.
        """
        self._max_step_s = max_step_s
        self._shortest = shortest
        # Steps are held up now and then, and never hurried: weights keep chunks rather too short.
        self._decode_s = _ByMagnitude(GRADUAL, AT_ONCE)  # of a step, by decode rows
        self._token_s = _ByMagnitude(AT_ONCE, GRADUAL)  # of a prefill token, by units of context
        self._since_decode_only = self._since_probe = PROBE_INTERVAL

    def limit(self, decode_rows: int, context: int) -> int | None:
        """Most prefill tokens of the next step, in which requests decode.

        Args:
            decode_rows: of those requests.
            context: tokens before the next chunk.

        Returns:
            0 for a step that is to be measured without a chunk; None where nothing was measured,
            so that the first steps are as they would be without a bound.
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
            work: of the step; of several in a row only where none has decode rows.
            seconds: from the end of the step before; positive.
        """
        if not work.prefill_tokens:
            self._decode_s.follow(work.decode_rows, seconds, begin=seconds)
            self._since_decode_only = 0
            return
        units, per_token = work.context // CONTEXT_UNIT, seconds / work.prefill_tokens
        if not work.decode_rows:
            # What a token of a long chunk costs is only a first guess for shorter ones.
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
            # Noise can make the difference of two times tiny: the known value is where it begins.
            self._token_s.follow(units, added / work.prefill_tokens, begin=value)


class _ByMagnitude:
    """Positive values that follow measurements, each for sizes within a factor of two."""

    def __init__(self, rise: float, fall: float) -> None:
        """
        Args:
            rise: weight of a measurement above the value.
            fall: of one below it.
        """
        self._values: dict[int, float] = {}
        self._num_measured: Counter[int] = Counter()
        self._rise, self._fall = rise, fall

    def __bool__(self) -> bool:
        return bool(self._values)

    def num_measured(self, size: int) -> int:
        """How many measurements of this magnitude there were."""
        return self._num_measured[size.bit_length()]

    def at(self, size: int) -> float | None:
        """The value of the nearest magnitude that was measured; None where none was."""
        if not self._values:
            return None
        magnitude = size.bit_length()
        return self._values[min(self._values, key=lambda known: (abs(known - magnitude), known))]

    def follow(self, size: int, measured: float, begin: float) -> None:
        """Moves the value of this magnitude towards a measurement; the first time from `begin`."""
        magnitude = size.bit_length()
        self._num_measured[magnitude] += 1
        value = self._values.setdefault(magnitude, begin)
        change = min(max(measured / value, 1.0 / MOST_CHANGE), MOST_CHANGE)
        self._values[magnitude] = value * change ** (self._rise if change > 1.0 else self._fall)
