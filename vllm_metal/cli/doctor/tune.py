# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor --tune`: finds the fastest kernel settings for this Mac, and stores them."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm_metal.cli.doctor import machine, packages
from vllm_metal.cli.doctor.report import REPORT_BUG, Finding, Report
from vllm_metal.device import identity, steadiness, tuned
from vllm_metal.device.child import Child, ChildResult, Progress, StageTimeout, python
from vllm_metal.device.tuned import Choices
from vllm_metal.settings import envs

#: Seconds after which no search starts, so that tuning takes three minutes: a running search may
#: take 50 s more, and choices that need a process per value some 50 s.
SECONDS = 75.0
#: Time limit of one search in seconds. A search has at most 24 timings of 2 s; only a hang is
#: longer.
_LIMIT = 180.0
_NAME = "tuner"
_SHARE_IT = (
    "Attach the report to an issue, so that its results can become the defaults for this chip."
)


@dataclass(frozen=True)
class Commands:
    """Commands that start the tuning processes."""

    search: tuple[str, ...]
    process: tuple[str, ...]  # completed by a name in OF_PROCESSES

    @staticmethod
    def of_doctor(full: bool) -> Commands:
        child = python("vllm_metal.cli.doctor.children.tuning")
        limits = ("--all",) if full else ("--seconds", f"{SECONDS:g}")
        return Commands((*child, *limits), (*child, "--process"))


@dataclass
class Tuning:
    """Choices, speeds and timings from the tuning processes."""

    choices: Choices
    facts: dict[str, float] = field(default_factory=dict)
    shares: list[dict[str, Any]] = field(default_factory=list)
    chosen: list[dict[str, Any]] = field(default_factory=list)  # choices in words, with gains
    timings: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "choices"}


class TuningFailed(Exception):
    """A tuning process failed, or took too long."""

    def __init__(self, ended: ChildResult) -> None:
        super().__init__(ended.exit_reason)
        self.ended = ended


def run(args: Namespace) -> int:
    """Tunes this machine, prints and writes the results, and returns the exit status.

    Raises ValueError if there is no GPU to time, OSError if the report cannot be written.
    """
    if envs.requested_device() == "cpu":
        raise ValueError(
            "doctor --tune times a Mac's GPU: run it on one, with VLLM_METAL_DEVICE unset"
        )
    probe = machine.probe_device(lambda stage: None)
    if probe.reported.get("device") != "metal":
        raise ValueError("doctor --tune times a Mac's GPU, and MLX finds none here")
    report = Report(args.report)
    report.add_facts(versions=packages.versions(), environment=dict(machine.settings()))
    report.add_facts(machine=machine.facts())
    tune(report, Commands.of_doctor(args.full), lambda: _kernels_work(args.full))
    return report.close()


def tune(found: Report, commands: Commands, kernels_work: Callable[[], bool]) -> None:
    """Tunes, and adds a finding and facts to a report; stores nothing on an unsteady machine.

    `kernels_work` runs the self-check of the kernels to time, and returns whether any attention
    kernel passed.
    """
    # Imports MLX; a child process has shown that this works.
    from metal_kernels.tuner.stopwatch import Unsteady

    try:
        if (why := steadiness.disturbance()) is not None:
            raise Unsteady(why)
        found.announce("checking the kernels that are to be timed")
        if not kernels_work():
            seen = "not tuned: the kernels fail their self-check"
            found.add(Finding(_NAME, "failed", seen, "`vllm-metal doctor` says which, and why."))
            return
        found.announce("timing kernels (three minutes; leave this Mac alone meanwhile)")
        tuning = Tuning(tuned.defaults(identity.chip()))
        _search(commands.search, tuning, found.progress)
        _search_processes(commands.process, tuning, found.progress)
    except Unsteady as error:
        advice = (
            "Plug it in, let it cool down, end other programs, and try again. Earlier settings "
            "stay in use."
        )
        found.add(Finding(_NAME, "failed", f"stopped: {error}", advice))
        return
    except TuningFailed as error:
        seen = f"the process that times kernels {error}"
        found.add(Finding(_NAME, "failed", seen, REPORT_BUG, error.ended.lines))
        return
    path = tuned.save(tuning.choices, tuning.to_json())
    found.add_facts(tuning={**tuning.to_json(), "choices": tuning.choices.to_json()})
    found.show(table(tuning))
    found.add(
        Finding(_NAME, "ok", f"kept in {path}, for servers that start from now on", _SHARE_IT)
    )
    if tuning.left:
        seen = f"not tuned, for lack of time: {'; '.join(tuning.left)}"
        advice = "Run `vllm-metal doctor --tune --full` to tune everything."
        found.add(Finding("tuner's rest", "warning", seen, advice))


def table(tuning: Tuning) -> Iterator[str]:
    """Formats the choices, and attention's share of the machine's peak speed."""
    facts = tuning.facts
    copy = facts["copy_bytes_per_second"]
    yield (
        f"A copy moves {copy / 1e9:.0f} GB/s here, a float16 product does "
        f"{facts['matmul_flops_per_second'] / 1e12:.1f} TFLOP/s, a small dispatch that waits for "
        f"another takes {facts['dispatch_seconds'] * 1e6:.1f} µs."
    )
    columns = f"{'µs':>9}{'GB/s of K/V':>13}{'of a copy':>11}{'MLX, µs':>10}{'of MLX':>8}"
    yield f"{'attention':24}{columns}"
    for share in tuning.shares:
        rate, mlx = share["moved"] / share["ours"], share["mlx"]
        mlx_cells = (
            ("-", "-") if mlx is None else (f"{mlx * 1e6:.0f}", f"{mlx / share['ours']:.0%}")
        )
        yield (
            f"{share['name']:24}{share['ours'] * 1e6:>9.0f}{rate / 1e9:>13.1f}{rate / copy:>11.0%}"
            f"{mlx_cells[0]:>10}{mlx_cells[1]:>8}"
        )
    yield "of MLX: the speed relative to MLX's own attention over contiguous K and V"
    yield "\nchosen:"
    for chosen in tuning.chosen:
        values = ", ".join(f"{name} {_format(value)}" for name, value in chosen["values"].items())
        yield f"  {chosen['chosen']}: {values} ({chosen['gain']:.2f} times as fast as by default)"


def _format(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    return " ".join(f"{context}:{chosen}" for context, chosen in value.items())


def _kernels_work(full: bool) -> bool:
    from metal_kernels.selfcheck import usable
    from vllm_metal.cli.doctor.children import tuning
    from vllm_metal.device import selfcheck
    from vllm_metal.device.record import Record

    record, cases = Record(), tuning.cases(full)
    list(selfcheck.outcomes(cases, record=record))
    tiles = usable(tuning.COMMON, record.outcomes([tuning.COMMON]))
    return bool(tiles.decode or tiles.prefill)


def _search(command: Sequence[str], tuning: Tuning, progress: Progress) -> None:
    # The process gets the variables that MLX reads once, as servers do.
    given = {variable: getattr(tuning.choices, name) for name, variable in tuned.VARIABLES.items()}
    variables = {
        variable: str(value)
        for variable, value in given.items()
        if value is not None and variable not in os.environ
    }
    for message in _messages(command, variables, progress):
        if "chosen" in message:
            tuning.chosen.append(message)
            tuning.choices = with_values(tuning.choices, message["kind"], message["values"])
        tuning.facts = message.get("facts", tuning.facts)
        tuning.shares = message.get("shares", tuning.shares)
        tuning.left = message.get("left", tuning.left)
        tuning.timings = message.get("timings", tuning.timings)


def _search_processes(command: Sequence[str], tuning: Tuning, progress: Progress) -> None:
    from metal_kernels.tuner.registry import OF_PROCESSES
    from metal_kernels.tuner.stopwatch import Stopwatch, Timing

    # MLX reads these settings once, so each value needs a process of its own.
    for name, choice in OF_PROCESSES.items():
        stopwatch = Stopwatch()

        def measure(value: int, name: str = name, stopwatch: Stopwatch = stopwatch) -> Timing:
            progress(f"{name} {value}")
            reported: dict[str, Any] = {}
            variables = {tuned.VARIABLES[name]: str(value)}
            for message in _messages((*command, name), variables, progress):
                reported |= message
            return stopwatch.keep(Timing(f"{name} {value}", tuple(reported["windows"])))

        default = getattr(tuning.choices, name) or choice.usual
        found = choice.search(measure, default)
        if found.value != default:
            tuning.choices = with_values(tuning.choices, None, {name: found.value})
        values = {name: found.value}
        tuning.chosen.append({"chosen": choice.name, "values": values, "gain": found.gain})
        tuning.timings += [asdict(timing) for timing in stopwatch.timings]


def with_values(choices: Choices, kind: str | None, values: Mapping[str, Any]) -> Choices:
    """Returns the choices with these values, for a kind of layer (None: for all)."""
    changed: dict[str, Any] = {
        name: value if kind is None else {**getattr(choices, name), kind: value}
        for name, value in values.items()
    }
    return replace(choices, **changed)


def _messages(
    command: Sequence[str], variables: Mapping[str, str], progress: Progress
) -> Iterator[dict[str, Any]]:
    """Yields the messages of a process.

    Raises Unsteady if the process reports an unsteady machine, TuningFailed if it fails.
    """
    from metal_kernels.tuner.stopwatch import Unsteady

    with Child(command, variables) as child:
        try:
            while (message := child.message(_LIMIT)) is not None:
                if "unsteady" in message:
                    raise Unsteady(message["unsteady"])
                if "stage" in message:
                    progress(message["stage"])
                yield message
            ended = child.wait(_LIMIT)
        except StageTimeout:
            ended = child.ended(None)
    if not ended.ok:
        raise TuningFailed(ended)
