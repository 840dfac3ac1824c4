# SPDX-License-Identifier: Apache-2.0
"""Searches for the fastest kernel settings, in a process that may hang or crash.

python -m vllm_metal.cli.doctor.children.tuning [--seconds N] [--all] | --process NAME
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import mlx.core as mx

from metal_kernels import command_buffers, kernel
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.selfcheck import Case, Check, usable
from metal_kernels.tuner.choice import Choice, Layer
from metal_kernels.tuner.registry import CHOICES, OF_PROCESSES
from metal_kernels.tuner.shares import facts, shares
from metal_kernels.tuner.stopwatch import Stopwatch, Unsteady
from vllm_metal.device import gpu_cores, record, steadiness
from vllm_metal.device.child import send_message

#: The attention of Llama 3 8B, for comparisons between machines.
COMMON = Case(AttentionShape(32, 8, 128, 128), mx.bfloat16, mx.bfloat16, 16)
_SERVED = 4  # kinds of layer, served last, that a quick run tunes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, help="seconds after which no search starts")
    parser.add_argument("--all", action="store_true", help="all kinds of layer ever served")
    parser.add_argument("--process", choices=tuple(OF_PROCESSES), help="time this one alone")
    args = parser.parse_args()
    command_buffers.raise_limit()  # as servers do
    stopwatch = Stopwatch(watch)
    try:
        if args.process is not None:
            timing = OF_PROCESSES[args.process].time(stopwatch)
            send_message(windows=timing.windows)
            return
        kernel.use(mx.fast.metal_kernel)
        known = record.Record()
        layers = [layer_of(case, known) for case in cases(args.all)]
        tune(layers, stopwatch, args.seconds)
    except Unsteady as error:
        send_message(unsteady=str(error))


def cases(every: bool) -> list[Case]:
    """Returns the kinds of layer to tune: COMMON, and the last served ones (`every`: all)."""
    served = record.served()[::-1]
    return list(dict.fromkeys([COMMON, *(served if every else served[:_SERVED])]))


def tune(
    layers: Sequence[Layer],
    stopwatch: Stopwatch,
    seconds: float | None = None,
    choices: Iterable[Choice] = CHOICES,
) -> None:
    """Runs every search; sends the parent the machine's speeds, each result and all timings.

    Also times the first layer's attention. Starts no search after `seconds` (None: no limit).
    Raises Unsteady if the machine is not idle.
    """
    began = time.monotonic()
    send_message(stage="what the machine does at most")
    send_message(facts=facts(stopwatch))
    send_message(shares=[asdict(share) for share in shares(layers[0], stopwatch)])
    left = []
    for choice in choices:
        wanted = [layer for layer in layers if choice.wanted(layer)]
        for layer in wanted if choice.of_layer else wanted[:1]:
            kind = str(layer.case) if choice.of_layer else None
            what = choice.name if kind is None else f"{choice.name} ({kind})"
            if seconds is not None and time.monotonic() - began > seconds:
                left.append(what)
                continue
            send_message(stage=what)
            chosen = choice.search(layer, stopwatch)
            send_message(chosen=what, kind=kind, values=dict(chosen.values), gain=chosen.gain)
    send_message(left=left, timings=[asdict(timing) for timing in stopwatch.timings])


def watch() -> None:
    """Raises Unsteady if the machine reports a disturbance."""
    if (why := steadiness.disturbance()) is not None:
        raise Unsteady(why)


def layer_of(case: Case, known: record.Record) -> Layer:
    """Describes a kind of layer, with the kernels that passed the self-check."""
    found = known.outcomes([case])
    right = {outcome.check for outcome in found if outcome.ok}
    states, gathered = (Check(name) in right for name in ("recurrence", "gathered"))
    return Layer(case, usable(case, found), states, gathered, gpu_cores.count())


if __name__ == "__main__":
    main()
