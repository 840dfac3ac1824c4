# SPDX-License-Identifier: Apache-2.0
"""Runs the checks in order: quick ones first, those that take minutes last."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import vllm_metal
from vllm_metal.commands.doctor import (
    engine,
    machine,
    model,
    packages,
    server,
    speed,
)
from vllm_metal.commands.doctor.child import Ended
from vllm_metal.commands.doctor.model import Model
from vllm_metal.commands.doctor.report import REPORT_BUG, Finding, Report
from vllm_metal.settings import envs
from vllm_metal.settings.extras import install_advice

Part = Literal["machine", "engine", "kernels"]
PARTS: tuple[Part, ...] = get_args(Part)


def run(
    report: Path,
    quick: bool,
    model_name: str | None = None,
    parts: Sequence[str] = PARTS,
    every: bool = False,
    again: bool = False,
) -> int:
    """Runs the checks, prints and writes each finding, and returns the exit status.

    Args:
        report: JSON file to write.
        quick: whether to check the kernels for a few shapes, and the server with a small KV cache.
        model_name: folder or hub name of a model to try; None: the embedded one if it is installed,
            else a tiny one with random weights.
        parts: which of PARTS; the machine is always checked.
        every: whether to check the kernels for all shapes, however long it takes.
        again: whether to check anew what was checked before.

    Raises:
        OSError: the report cannot be written.
    """
    found = Report(report)
    looked = _look_at_machine(found, model_name)
    if "engine" in parts:
        with _guarded(found, "engine"):
            _try_engine(found, looked, quick, model_name, every)
    if "kernels" in parts:
        with _guarded(found, "kernels"):
            _try_kernels(found, looked, quick, every, again)
    return found.close()


@contextmanager
def _guarded(found: Report, name: str) -> Iterator[None]:
    """Turns an error of a check itself into a finding."""
    try:
        yield
    except Exception as error:
        seen = f"the check itself failed: {type(error).__name__}: {error}"
        lines = tuple(traceback.format_exc().splitlines())
        found.add(Finding(name, "failed", seen, REPORT_BUG, lines))


def _look_at_machine(found: Report, model_name: str | None) -> Ended:
    """Checks the machine; returns what MLX says of it."""
    found.add_facts(versions=packages.versions(), environment=dict(machine.settings()))
    with _guarded(found, "facts"):
        found.add_facts(machine=machine.facts(), crash_reports=machine.crash_reports())
    system = machine.this_system()
    checks: dict[str, Callable[[], Finding]] = {
        "versions": packages.check_versions,
        "settings": machine.check_settings,
        "processor": lambda: machine.check_processor(system),
        "system": lambda: machine.check_release(system),
        "disk": lambda: machine.check_disk(envs.cache_dir()),
    }
    for name, check in checks.items():
        with _guarded(found, name):
            found.add(check())
    looked = machine.look_at_device(found.progress)
    found.add(machine.check_device(looked, _requested()))
    if looked.ok:
        found.add_facts(**{name: said for name, said in looked.told.items() if name != "stage"})
        found.add(machine.check_memory(looked.told, model.expected_weights(model_name)))
    return looked


def _requested() -> envs.Device | None:
    """The requested device; None also for a wrong value, which the check of settings reports."""
    try:
        return envs.requested_device()
    except ValueError:
        return None


def _try_engine(
    found: Report, looked: Ended, quick: bool, model_name: str | None, every: bool
) -> None:
    if "settings" in found.failed or not looked.ok:
        found.add(Finding("engine", "warning", "not tried: correct what failed above first"))
        return
    if _requested() is None:
        seen = "not tried: the plugin does not apply on this machine"
        found.add(Finding("engine", "warning", seen, packages.advice_to_try()))
        return
    found.announce("asking vLLM which platform it chooses (some seconds)")
    asked = packages.ask_vllm(found.progress)
    found.add(packages.check_platform(asked))
    if (touched := packages.check_touched(asked)) is not None:
        found.add(touched)
    if asked.told.get("platform") != vllm_metal.PLATFORM:
        found.add(Finding("engine", "warning", "not tried: vLLM does not choose this plugin"))
        return
    within = packages.try_in_vllm(found.progress)
    found.add(packages.check_in_vllm(within, metal=looked.told["device"] == "metal"))
    with _model(found, model_name) as chosen:
        found.announce(f"an engine with {chosen.name} (half a minute, large models longer)")
        tried = engine.try_in_process(chosen, found.progress)
        checked = engine.check_in_process(tried)
        found.add(checked)
        if checked.status == "ok":
            found.add(engine.compare(chosen, tried, found.progress))
        found.announce(f"a server with {chosen.name} (half a minute, large models longer)")
        found.add(server.try_server(chosen, small_pool=quick, progress=found.progress))
        if checked.status == "ok":
            _time_engine(found, chosen, quick)
            if every:
                found.announce("the same engine with parts turned off, one at a time")
                found.add(engine.check_variants(tried, engine.try_variants(chosen, found.progress)))


def _time_engine(found: Report, chosen: Model, quick: bool) -> None:
    found.announce(f"the speed of an engine, and of mlx-lm alone, with {chosen.name}")
    pool = engine.KV_CACHE_BYTES if quick else None
    timed = speed.try_engine(chosen, pool, found.progress)
    found.add(speed.check_idle(timed))
    if not timed.ok:
        found.add(speed.check_speed(timed, timed))
        return
    alone = speed.try_mlx_lm(chosen, timed, found.progress)
    found.add(speed.check_speed(timed, alone))
    found.add_facts(speed={"engine": timed.told, "mlx-lm": alone.told})


@contextmanager
def _model(found: Report, name: str | None) -> Iterator[Model]:
    """The model to try; adds a finding if the embedded one cannot be used."""
    if name is not None:
        yield Model(name, name, local=Path(name).is_dir())
        return
    if not model.missing():
        converted = model.embedded(found.progress)
        if converted.ok:
            folder = next(line for line in reversed(converted.lines) if Path(line).is_dir())
            yield Model("the embedded SmolLM2-135M", folder, local=True)
            return
        advice = (
            "If the disk was full, free some space. Otherwise attach the report to a bug report."
        )
        seen = f"the process that converts the embedded model {converted.how}"
        found.add(Finding("model", "failed", seen, advice, converted.lines))
    else:
        advice = "\n".join(
            [
                "To try a trained model, give --model NAME, or install the embedded one:",
                *model.missing(),
            ]
        )
        seen = "the embedded model is not installed; a tiny one with random weights is tried"
        found.add(Finding("model", "ok", seen, advice))
    with model.made_on_the_spot() as made:
        yield made


def _try_kernels(
    found: Report, looked: Ended, quick: bool, every: bool = False, again: bool = False
) -> None:
    if not looked.ok:
        found.add_facts(kernels="not run: MLX does not run")
        found.add(Finding("kernels", "warning", "not run: correct what failed above first"))
        return
    # Imports MLX, which a child process has shown to work.
    from vllm_metal.commands.doctor import kernels
    from vllm_metal.device.record import Record

    runner = kernels.find_runner()
    if runner is None:
        found.add_facts(kernels="not run: no Metal device, and no interpreter")
        advice = f"To interpret them on the CPU:\n{install_advice('interpreter')}"
        seen = "not run: without a Metal device they need an interpreter"
        found.add(Finding("kernels", "warning", seen, advice))
        return
    on_metal = bool(looked.told["metal"])
    wanted = kernels.wanted_cases(quick, every)
    record = Record() if on_metal else None  # what an interpreter finds says nothing of a GPU
    if again and record is not None:
        record.forget()
    found.announce(f"kernels, for {len(wanted)} kinds of layer")
    found.show([f"{runner.how}:", kernels.header()])
    outcomes = []
    budget = kernels.BUDGET if on_metal and not every else None
    checked = kernels.check(wanted, runner, found.progress, record, budget)
    for case, alike in itertools.groupby(checked, key=lambda outcome: outcome.case):
        outcomes += (last := list(alike))
        found.show([kernels.row(case, last)])
        found.add_facts(how=runner.how, kernels=[outcome.to_json() for outcome in outcomes])
    found.show(kernels.legend(outcomes))
    found.add(kernels.finding(outcomes, on_metal))
    if on_metal:
        if (left := kernels.left_over(wanted, outcomes)) is not None:
            found.add(left)
        timed = kernels.time_all(found.progress)
        found.add_facts(timings=timed)
        found.show(kernels.times_table(timed))
