# SPDX-License-Identifier: Apache-2.0
"""Finds how to split contexts: the cost of a part, and the number of concurrent threadgroups.

Both are fitted to six timings of one long context in equal parts. n parts of L keys on S slots take
t * (ceil(n / S) * (L + c) + j), where t is the time of a key, c the cost of a part in keys, and j
that of the reduction. Few long parts determine t, many medium ones S, many short ones c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import variance

from metal_kernels.paged_attention import Splits
from metal_kernels.paged_attention.splits import join_cost
from metal_kernels.selfcheck import timing
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Measure, confirmed
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

#: Divisors of the context for the timed lengths of parts: 64 for 32k and up.
_SHARES = (512, 256, 128, 64, 32, 8)
_SHORTEST = 16  # keys: kernels process strips of up to this length
_COSTS = (6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # keys
#: Candidates for threadgroups per core.
_THREADGROUPS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_CORES = 24  # used if unknown


@dataclass(frozen=True)
class LongContext:
    """One request's context, read by all K/V heads."""

    keys: int
    heads: int  # Hkv

    def duration(self, length: int, splits: Splits) -> float:
        """Predicts the time with parts of `length` keys, in units of a key's time."""
        parts = -(-self.keys // length)
        turns = -(-parts * self.heads // splits.slots)
        return turns * (min(length, self.keys) + splits.part_cost) + join_cost(parts)


def search(
    measure: Measure[Splits], context: LongContext, cores: int | None, current: Splits
) -> Chosen:
    """Fits splits to six timings, then compares them with the current ones by four timings.

    cores: number of GPU cores; None: unknown.
    """
    lengths = dict.fromkeys(max(context.keys // share, _SHORTEST) for share in _SHARES)
    seen = {length: measure(replace(current, fixed=length)).seconds for length in lengths}
    found = confirmed(measure, current, fitted(seen, context, _candidates(cores)))
    if found.value == current:
        return Chosen({"part_cost": None, "slots": None})
    return Chosen({"part_cost": found.value.part_cost, "slots": found.value.slots}, found.gain)


def fitted(seen: Mapping[int, float], context: LongContext, candidates: Sequence[Splits]) -> Splits:
    """Returns the candidate that best explains the times `seen`, in seconds by length of parts."""

    def unexplained(splits: Splits) -> float:
        # Only the unknown factor t separates model and time, so their log ratio should be constant.
        return variance(
            [log(took / context.duration(length, splits)) for length, took in seen.items()]
        )

    return min(candidates, key=unexplained)


def _candidates(cores: int | None) -> list[Splits]:
    slots = [round(share * (cores or _CORES)) for share in _THREADGROUPS]
    return [Splits(part_cost=cost, slots=count) for cost in _COSTS for count in slots]


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    shape, case = layer.case.shape, layer.case
    over = timing.Layer(case, layer.context)
    calls: dict[Splits, timing.Call] = {}

    def measure(splits: Splits) -> Timing:
        if splits not in calls:
            calls[splits] = over.attend(1, 1, layer.context, layer.tiles, splits)
        return stopwatch.time_call(f"1 x {layer.context} with {splits}", calls[splits])

    context = LongContext(layer.context, shape.num_kv_heads)
    return search(measure, context, layer.cores, Splits.of_gpu(layer.cores))


def _wanted(layer: Layer) -> bool:
    return layer.tiles.split and layer.case.window is None and "decode" in layer.case.kernels


CHOICE = Choice("parts of contexts", _wanted, _search, of_layer=False)
