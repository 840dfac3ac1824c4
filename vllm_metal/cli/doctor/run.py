# SPDX-License-Identifier: Apache-2.0
"""Runs the checks in order: quick ones first, those that take minutes last."""

from __future__ import annotations

import itertools
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import vllm_metal
from metal_kernels.cache import cache_dir
from vllm_metal.cli.doctor import (
    engine,
    machine,
    model,
    network,
    packages,
    server,
    speed,
)
from vllm_metal.cli.doctor.model import Model
from vllm_metal.cli.doctor.report import REPORT_BUG, Finding, Report
from vllm_metal.device.child import ChildResult
from vllm_metal.settings import envs
from vllm_metal.settings.extras import install_advice


def run(args: Namespace) -> int:
    """Runs the checks, prints and writes each finding, and returns the exit status.

    Raises OSError if the report cannot be written.
    """
    report = Report(args.report)
    wired = machine.wired_bytes()
    probe = _look_at_machine(report, args.model)
    with _guarded(report, "network"):
        for finding in network.checks(network.this_network(), args.master_addr, args.master_port):
            report.add(finding)
    if args.only in (None, "engine"):
        with _guarded(report, "engine"):
            _try_engine(report, probe, args)
    if args.only in (None, "kernels"):
        with _guarded(report, "kernels"):
            _try_kernels(report, probe, args)
    if wired is not None:
        report.add_facts(wired_bytes={"before": wired, "after": machine.wired_bytes()})
    return report.close()


@contextmanager
def _guarded(report: Report, name: str) -> Iterator[None]:
    """Turns an exception in a check's code into a finding."""
    try:
        yield
    except Exception as error:
        seen = f"the check itself failed: {type(error).__name__}: {error}"
        lines = tuple(traceback.format_exc().splitlines())
        report.add(Finding(name, "failed", seen, REPORT_BUG, lines))


def _look_at_machine(report: Report, model_name: str | None) -> ChildResult:
    report.add_facts(versions=packages.versions(), environment=dict(machine.settings()))
    with _guarded(report, "facts"):
        report.add_facts(machine=machine.facts(), crash_reports=machine.crash_reports())
    system = machine.this_system()
    checks: dict[str, Callable[[], Finding]] = {
        "versions": packages.check_versions,
        "settings": machine.check_settings,
        "processor": lambda: machine.check_processor(system),
        "system": lambda: machine.check_release(system),
        "disk": lambda: machine.check_disk(cache_dir()),
    }
    for name, check in checks.items():
        with _guarded(report, name):
            report.add(check())
    if (driver := machine.check_driver(system)) is not None:
        report.add(driver)
    probe = machine.probe_device(report.progress)
    report.add(machine.check_device(probe, _requested()))
    if probe.ok:
        report.add_facts(
            **{name: value for name, value in probe.reported.items() if name != "stage"}
        )
        report.add(machine.check_memory(probe.reported, model.expected_weights(model_name)))
    return probe


def _requested() -> envs.Device | None:
    try:
        return envs.requested_device()
    except ValueError:  # the check of settings reports it
        return None


def _try_engine(report: Report, probe: ChildResult, args: Namespace) -> None:
    if "settings" in report.failed or not probe.ok:
        report.add(Finding("engine", "warning", "not tried: correct what failed above first"))
        return
    if _requested() is None:
        seen = "not tried: the plugin does not apply on this machine"
        report.add(Finding("engine", "warning", seen, packages.advice_to_try()))
        return
    report.announce("asking vLLM which platform it chooses (some seconds)")
    asked = packages.probe_vllm(report.progress)
    report.add(packages.check_platform(asked))
    if asked.reported.get("platform") != vllm_metal.PLATFORM:
        report.add(Finding("engine", "warning", "not tried: vLLM does not choose this plugin"))
        return
    within = packages.try_in_vllm(report.progress)
    report.add(packages.check_in_vllm(within, metal=probe.reported["device"] == "metal"))
    with _model(report, args.model) as chosen:
        report.announce(f"an engine with {chosen.name} (half a minute, large models longer)")
        tried = engine.run_child(chosen, report.progress, "engine")
        checked = engine.check_in_process(tried)
        report.add(checked)
        if checked.status == "ok":
            report.add(engine.compare(chosen, tried, report.progress))
        report.announce(f"a server with {chosen.name} (half a minute, large models longer)")
        report.add(server.try_server(chosen, small_pool=args.quick, progress=report.progress))
        if checked.status == "ok":
            _time_engine(report, chosen, args.quick)
            if args.all:
                report.announce("the same engine with parts turned off, one at a time")
                report.add(
                    engine.check_variants(tried, engine.try_variants(chosen, report.progress))
                )


def _time_engine(report: Report, chosen: Model, quick: bool) -> None:
    report.announce(f"the speed of an engine, and of mlx-lm alone, with {chosen.name}")
    pool = ("--pool", str(engine.KV_CACHE_BYTES)) if quick else ()
    timed = engine.run_child(chosen, report.progress, "engine", "--timed", *pool)
    report.add(speed.check_idle(timed))
    if not timed.ok:
        report.add(speed.check_speed(timed, timed))
        return
    # mlx-lm gets the engine's dtype and lengths.
    arguments = (str(timed.reported[name]) for name in ("dtype", "num_prompt", "num_answer"))
    alone = engine.run_child(chosen, report.progress, "mlx_lm_alone", "time", *arguments)
    report.add(speed.check_speed(timed, alone, _requested()))
    report.add_facts(speed={"engine": timed.reported, "mlx-lm": alone.reported})


@contextmanager
def _model(report: Report, name: str | None) -> Iterator[Model]:
    """Yields the model to try; adds a finding if the embedded one cannot be used."""
    if name is not None:
        yield Model(name, name, local=Path(name).exists())
        return
    if not model.missing():
        converted = model.embedded(report.progress)
        if converted.ok:
            folder = next(line for line in reversed(converted.lines) if Path(line).is_dir())
            yield Model("the embedded SmolLM2-135M", folder, local=True)
            return
        advice = (
            "If the disk was full, free some space. Otherwise attach the report to a bug report."
        )
        seen = f"the process that converts the embedded model {converted.exit_reason}"
        report.add(Finding("model", "failed", seen, advice, converted.lines))
    else:
        advice = "\n".join(
            [
                "To try a trained model, give --model NAME, or install the embedded one:",
                *model.missing(),
            ]
        )
        seen = "the embedded model is not installed; a tiny one with random weights is tried"
        report.add(Finding("model", "ok", seen, advice))
    with model.made_on_the_spot(report.progress) as tiny:
        yield tiny


def _try_kernels(report: Report, probe: ChildResult, args: Namespace) -> None:
    if not probe.ok:
        report.add_facts(kernels="not run: MLX does not run")
        report.add(Finding("kernels", "warning", "not run: correct what failed above first"))
        return
    # Imports MLX; a child process has shown that this works.
    from vllm_metal.cli.doctor import kernels
    from vllm_metal.device.record import Record

    runner = kernels.find_runner()
    if runner is None:
        report.add_facts(kernels="not run: no Metal device, and no interpreter")
        advice = f"To interpret them on the CPU:\n{install_advice('interpreter')}"
        seen = "not run: without a Metal device they need an interpreter"
        report.add(Finding("kernels", "warning", seen, advice))
        return
    on_metal = bool(probe.reported["metal"])
    wanted = kernels.wanted_cases(args.quick, args.all)
    record = Record() if on_metal else None  # interpreted results do not apply to a GPU
    if args.again and record is not None:
        record.forget()
    report.announce(f"kernels, for {len(wanted)} kinds of layer")
    report.show([f"{runner.description}:", kernels.header()])
    outcomes = []
    budget = kernels.BUDGET if on_metal and not args.all else None
    checked = kernels.check(wanted, runner, report.progress, record, budget)
    for case, group in itertools.groupby(checked, key=lambda outcome: outcome.case):
        outcomes += (of_case := list(group))
        report.show([kernels.row(case, of_case)])
        report.add_facts(
            how=runner.description, kernels=[outcome.to_json() for outcome in outcomes]
        )
    report.show(kernels.legend(outcomes))
    report.add(kernels.finding(outcomes, on_metal))
    if on_metal:
        if (left := kernels.pending_checks(wanted, outcomes)) is not None:
            report.add(left)
        if (decode := kernels.decode_speed(outcomes)) is not None:
            report.add(decode)
        timed = kernels.time_all(report.progress)
        report.add_facts(timings=timed)
        report.show(kernels.times_table(timed))
