# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal doctor --tune`: finds what kernels are quickest with on this Mac, and keeps it."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vllm_metal.cli.doctor import machine, packages
from vllm_metal.cli.doctor.report import REPORT_BUG, Finding, Report
from vllm_metal.device import identity, steadiness, tuned
from vllm_metal.device.child import Child, Ended, Progress, TookTooLong, python
from vllm_metal.device.tuned import Choices
from vllm_metal.settings import envs

#: Seconds after which no other search begins, so that all of it takes three minutes: the one that
#: runs may take 50 more, and the values of what each needs a process some 50.
SECONDS = 75.0
#: Of one search, which has 24 timings of two seconds at most; only a hang is longer.
_LIMIT = 180.0
_NAME = "tuner"
_SHARE_IT = "Attach the report to an issue, so that chips like yours begin with what yours found."


@dataclass(frozen=True)
class Commands:
    """The processes that time."""

    search: tuple[str, ...]
    process: tuple[str, ...]  # takes a name of OF_PROCESSES behind it

    @staticmethod
    def of_doctor(full: bool) -> Commands:
        child = python("vllm_metal.cli.doctor.children.tuning")
        limits = ("--all",) if full else ("--seconds", f"{SECONDS:g}")
        return Commands((*child, *limits), (*child, "--process"))


@dataclass
class Tuning:
    """What the processes found."""

    choices: Choices
    facts: dict[str, float] = field(default_factory=dict)
    shares: list[dict[str, Any]] = field(default_factory=list)
    chosen: list[dict[str, Any]] = field(default_factory=list)  # in words, with gains
    timings: list[dict[str, Any]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "choices"}


class Died(Exception):
    """A process that times ended otherwise than it should."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.how)
        self.ended = ended


def run(args: Namespace) -> int:
    """Tunes this machine, prints and writes what was found, and returns the exit status.

    Args:
        args: of `vllm_metal.cli.main`.

    Raises:
        ValueError: there is no GPU to time.
        OSError: the report cannot be written.
    """
    if envs.requested_device() == "cpu":
        raise ValueError(
            "doctor --tune times a Mac's GPU: run it on one, with VLLM_METAL_DEVICE unset"
        )
    looked = machine.look_at_device(lambda stage: None)
    if looked.told.get("device") != "metal":
        raise ValueError("doctor --tune times a Mac's GPU, and MLX finds none here")
    found = Report(args.report)
    found.add_facts(versions=packages.versions(), environment=dict(machine.settings()))
    found.add_facts(machine=machine.facts())
    tune(found, Commands.of_doctor(args.full), lambda: _kernels_work(args.full))
    return found.close()


def tune(found: Report, commands: Commands, kernels_work: Callable[[], bool]) -> None:
    """Adds a finding, and facts. Nothing is kept of a machine that was unsteady meanwhile.

    Args:
        found: to add to.
        commands: of the processes that time.
        kernels_work: has the kernels checked that are timed; whether any attention passed.
    """
    # Imports MLX, which a child process has shown to work.
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
            "Plug it in, let it cool down, end other programs, and try again. What was chosen "
            "before stays."
        )
        found.add(Finding(_NAME, "failed", f"stopped: {error}", advice))
        return
    except Died as error:
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
        seen = f"not tuned, for time: {'; '.join(tuning.left)}"
        found.add(Finding("tuner's rest", "warning", seen, "`--tune --full` takes the time."))


def table(tuning: Tuning) -> Iterator[str]:
    """What was chosen, and how near attention comes to what the machine does at most."""
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
        theirs = ("-", "-") if mlx is None else (f"{mlx * 1e6:.0f}", f"{mlx / share['ours']:.0%}")
        yield (
            f"{share['name']:24}{share['ours'] * 1e6:>9.0f}{rate / 1e9:>13.1f}{rate / copy:>11.0%}"
            f"{theirs[0]:>10}{theirs[1]:>8}"
        )
    yield "of MLX: the speed beside MLX's own attention over K and V side by side, without a pool"
    yield "\nchosen:"
    for chosen in tuning.chosen:
        values = ", ".join(f"{name} {_shown(value)}" for name, value in chosen["values"].items())
        yield f"  {chosen['chosen']}: {values} ({chosen['gain']:.2f} times as fast as by default)"


def _shown(value: Any) -> str:
    """A value; of several contexts, one for each."""
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
    """Searches what one process can find, with what MLX reads once as servers have it."""
    given = {variable: getattr(tuning.choices, name) for name, variable in tuned.VARIABLES.items()}
    variables = {
        variable: str(value)
        for variable, value in given.items()
        if value is not None and variable not in os.environ
    }
    for told in _heard(command, variables, progress):
        if "chosen" in told:
            tuning.chosen.append(told)
            tuning.choices = with_values(tuning.choices, told["kind"], told["values"])
        tuning.facts = told.get("facts", tuning.facts)
        tuning.shares = told.get("shares", tuning.shares)
        tuning.left = told.get("left", tuning.left)
        tuning.timings = told.get("timings", tuning.timings)


def _search_processes(command: Sequence[str], tuning: Tuning, progress: Progress) -> None:
    """Searches what takes a process for each value."""
    from metal_kernels.tuner.registry import OF_PROCESSES
    from metal_kernels.tuner.stopwatch import Stopwatch, Timing

    for name, choice in OF_PROCESSES.items():
        kept = Stopwatch()

        def measure(value: int, name: str = name, kept: Stopwatch = kept) -> Timing:
            progress(f"{name} {value}")
            told: dict[str, Any] = {}
            variables = {tuned.VARIABLES[name]: str(value)}
            for message in _heard((*command, name), variables, progress):
                told |= message
            return kept.keep(Timing(f"{name} {value}", tuple(told["windows"])))

        by_default = getattr(tuning.choices, name) or choice.usual
        found = choice.search(measure, by_default)
        if found.value != by_default:
            tuning.choices = with_values(tuning.choices, None, {name: found.value})
        values = {name: found.value}
        tuning.chosen.append({"chosen": choice.name, "values": values, "gain": found.gain})
        tuning.timings += [asdict(timing) for timing in kept.timings]


def with_values(choices: Choices, kind: str | None, values: Mapping[str, Any]) -> Choices:
    """The choices with these values, of a kind of layer; None: of all."""
    changed: dict[str, Any] = {
        name: value if kind is None else {**getattr(choices, name), kind: value}
        for name, value in values.items()
    }
    return replace(choices, **changed)


def _heard(
    command: Sequence[str], variables: Mapping[str, str], progress: Progress
) -> Iterator[dict[str, Any]]:
    """The messages of a process.

    Raises:
        Unsteady: the process says that the machine is.
        Died: it did not end well.
    """
    from metal_kernels.tuner.stopwatch import Unsteady

    with Child(command, variables) as child:
        try:
            while (told := child.message(_LIMIT)) is not None:
                if "unsteady" in told:
                    raise Unsteady(told["unsteady"])
                if "stage" in told:
                    progress(told["stage"])
                yield told
            ended = child.wait(_LIMIT)
        except TookTooLong:
            ended = child.ended(None)
    if not ended.ok:
        raise Died(ended)
