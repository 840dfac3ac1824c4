# SPDX-License-Identifier: Apache-2.0
"""Finds whether to force a fused kernel that MLX skips for attention of prompts."""

from __future__ import annotations

from metal_kernels.selfcheck import timing
from metal_kernels.tuner.choice import Choice, Chosen, Layer
from metal_kernels.tuner.search import Measure, confirmed
from metal_kernels.tuner.stopwatch import Stopwatch, Timing

#: Head sizes for which MLX has fused kernels, but uses plain operations by default.
_SIZES = (192, 256)
_ROWS = 512


def search(measure: Measure[bool]) -> Chosen:
    """Keeps the fused kernel unless MLX's own choice is clearly faster; takes four timings.

    measure: times a prompt with or without a forced kernel.
    """
    found = confirmed(measure, True, False)
    return Chosen({"force_fused": found.value}, found.gain)


def _search(layer: Layer, stopwatch: Stopwatch) -> Chosen:
    over = timing.Layer(layer.case, layer.context)
    rows = min(_ROWS, layer.prompts[-1])
    batch = timing.bounded(layer.case, (1, rows, layer.context // 4), 1)
    calls = {forced: over.attend_gathered(*batch, force_fused=forced) for forced in (True, False)}

    def measure(forced: bool) -> Timing:
        how = "forced" if forced else "as MLX chooses"
        return stopwatch.time_call(f"{rows} rows, fused {how}", calls[forced])

    return search(measure)


def _wanted(layer: Layer) -> bool:
    case = layer.case
    return layer.gathered and case.shape.head_size in _SIZES and case.softcap is None


CHOICE = Choice("MLX's fused attention", _wanted, _search)
