# SPDX-License-Identifier: Apache-2.0
"""Compares an engine's speed with mlx-lm's, and a step after a pause with a usual one.

Speed never fails a check, because it depends on the machine's load; it only causes warnings.
"""

from __future__ import annotations

from vllm_metal.cli.doctor.report import REPORT_IT, Finding
from vllm_metal.device.child import ChildResult
from vllm_metal.settings.envs import Device

GIB = 2**30
#: Minimum share of mlx-lm's speed without a warning. vLLM's Python code takes 1 to 2 ms per step,
#: which halves the speed of the smallest models on fast Macs, and matters little for others.
LEAST_RATIO = 0.5
#: The same for decode of models with at least so many parameters per token: their steps take the
#: GPU longer than the host, whose time is hidden.
LEAST_RATIO_LARGE, LARGE = 0.85, 2.8e9
#: Minimum ratio and difference (in seconds) to a usual step that make a step after a pause
#: noticeable before each answer.
MOST_IDLE_RATIO, MOST_IDLE_SECONDS = 3.0, 0.1
_SMALLER = (
    "macOS takes back memory that the GPU has not used for a while. A smaller KV cache returns "
    "sooner: set --kv-cache-memory-bytes, or see Wiring in docs/memory.md."
)


def check_speed(timed: ChildResult, alone: ChildResult, device: Device | None = None) -> Finding:
    """Compares tokens/s with mlx-lm's; see LEAST_RATIO and LEAST_RATIO_LARGE.

    `timed` and `alone`: the ended processes of the engine and of mlx-lm. On a CPU, which other
    programs share, no ratio causes a warning.
    """
    name = "speed beside mlx-lm"
    for tried, owner in ((timed, "the engine's"), (alone, "mlx-lm's")):
        if not tried.ok:
            seen = f"not compared: {owner} process {tried.exit_reason}"
            return Finding(name, "warning", seen, REPORT_IT, tried.lines)
    ratios = {
        phase: timed.reported[phase] / alone.reported[phase] for phase in ("prefill", "decode")
    }
    seen = ", ".join(
        f"{phase} {timed.reported[phase]:.0f} tokens a second, {ratios[phase]:.2f} of mlx-lm's "
        f"{alone.reported[phase]:.0f}"
        for phase in ratios
    )
    seen += (
        f"; with a KV cache for {timed.reported['pool_tokens']} tokens, "
        f"{timed.reported['active_bytes'] / GIB:.2f} GiB with the weights"
    )
    if device == "cpu":
        seen += "; on a CPU, which says nothing about a Mac's GPU"
    elif min(ratios.values()) < LEAST_RATIO or ratios["decode"] < _least(alone):
        advice = (
            "This is normal only for models of a few hundred million parameters: close other "
            f"programs, and try your model with --model NAME. {REPORT_IT}"
        )
        if alone.reported.get("parameters", 0) >= LARGE:
            advice = f"Close other programs, and try again. {REPORT_IT}"
        return Finding(name, "warning", seen, advice, timed.lines)
    return Finding(name, "ok", seen, log=timed.lines)


def _least(alone: ChildResult) -> float:
    return LEAST_RATIO_LARGE if alone.reported.get("parameters", 0) >= LARGE else LEAST_RATIO


def check_idle(timed: ChildResult) -> Finding:
    """Compares a decode step after a pause with a usual one; see MOST_IDLE_RATIO."""
    name = "a step after the device was idle"
    if not timed.ok:
        seen = f"not timed: the engine's process {timed.exit_reason}"
        return Finding(name, "warning", seen, REPORT_IT, timed.lines)
    reported = timed.reported
    usual, after = reported["step_seconds"], reported["step_after_idle_seconds"]
    seen = (
        f"{1000 * after:.1f} ms after {reported['idle_seconds']:g} s, {after / usual:.1f} times as "
        f"long as without a pause ({1000 * usual:.1f} ms)"
    )
    if after > MOST_IDLE_RATIO * usual and after - usual > MOST_IDLE_SECONDS:
        return Finding(name, "warning", seen, f"{_SMALLER} {REPORT_IT}")
    return Finding(name, "ok", seen)
