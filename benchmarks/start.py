# SPDX-License-Identifier: Apache-2.0
"""Measures the phases of an engine's start, for first and second starts.

Each start is a process of its own. A first start finds empty caches of vLLM and of this plugin, and
converts the embedded model. A "bare" one also lacks the bytecode that set-up normally leaves. A
second start finds the first one's caches. The engine has the settings of examples/demo.py. With
`--before`, alternates with another checkout under the same interpreter and packages.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
#: Phases of a start, in plot order.
PHASES = ("imports", "converting", "configuration", "engine", "model", "profile", "pool", "warm-up")
#: Timed methods of the worker, with their phases.
WORK = {
    "load_model": "model",
    "determine_available_memory": "profile",
    "initialize_from_config": "pool",
    "compile_or_warm_up_model": "warm-up",
}
STARTS = ("bare first", "first", "second")
COMMANDS = {"fit": ["fit", "{model}", "--memory", "16GB"], "doctor --help": ["doctor", "--help"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another checkout, to compare")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("starts", "commands"),
        default=["starts", "commands"],
        help="default: both; keeps the results of other parts",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(start()))
        return
    from _shared import note

    trees = {"before": args.before, "now": ROOT} if args.before else {"now": ROOT}
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in trees}
    for run in range(args.runs):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as folder:
                caches = Path(folder)
                for which in STARTS if "starts" in args.parts else STARTS[:1]:
                    if which == "first":  # keep the bare start's bytecode
                        for cache in ("vllm", "vllm-metal"):
                            shutil.rmtree(caches / cache, ignore_errors=True)
                    phases = measured(tree, caches)
                    if "starts" in args.parts:
                        found[name].setdefault(which, []).append(phases)
                        note(f"{name}, run {run + 1}, {which}: {sum(phases.values()):.1f} s")
                if "commands" in args.parts:
                    for command, seconds in commands(tree, caches).items():
                        found[name].setdefault(command, []).append(seconds)
    report({name: kept(name) | runs for name, runs in found.items()})


def kept(name: str) -> dict[str, list[Any]]:
    """Returns a tree's results of earlier runs."""
    path = RESULTS / "start.json"
    found: dict[str, list[Any]] = (
        json.loads(path.read_text()).get(name, {}) if path.is_file() else {}
    )
    return found


def start() -> dict[str, float]:
    """Returns seconds of each phase of a start in this process, begun at STARTED."""
    begun = float(os.environ["STARTED"])
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    sys.path.insert(0, str(ROOT / "examples"))
    import _common
    import demo

    _common.prepare(offline=True)
    clock = time.time()
    model = _common.default_model()
    converting = time.time() - clock
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    imported = time.time()
    config = EngineArgs(
        model=str(model),
        max_model_len=demo.MAX_MODEL_LEN,
        max_num_seqs=1,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=int(demo.KV_CACHE_GIB * 2**30),
    ).create_engine_config()
    configured = time.time()
    from vllm_metal.engine.worker.worker import MetalWorker

    phases: dict[str, float] = {}
    for method, phase in WORK.items():
        setattr(MetalWorker, method, _timed(getattr(MetalWorker, method), phase, phases))
    engine = LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)
    ready = time.time()
    engine.engine_core.shutdown()
    phases["imports"] = imported - begun - converting
    phases["converting"] = converting
    phases["configuration"] = configured - imported
    phases["engine"] = ready - configured - sum(phases.get(phase, 0) for phase in WORK.values())
    return {phase: phases[phase] for phase in PHASES}


def _timed(method: Callable[..., Any], phase: str, phases: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        begun = time.time()
        result = method(*args, **options)
        phases[phase] = phases.get(phase, 0.0) + time.time() - begun
        return result

    return call


def environment(tree: Path, caches: Path) -> dict[str, str]:
    """Returns the environment to run a checkout with its caches in a folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPATH": str(tree),
        "PYTHONSAFEPATH": "1",  # else this script's folder comes first
        "PYTHONPYCACHEPREFIX": str(caches / "bytecode"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "VLLM_METAL_CACHE": str(caches / "vllm-metal"),
        "VLLM_METAL_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def measured(tree: Path, caches: Path) -> dict[str, float]:
    """Returns the phases of one start of a checkout in a new process."""
    asked = environment(tree, caches) | {"STARTED": str(time.time())}
    line = [sys.executable, __file__, "--child"]
    done = subprocess.run(line, env=asked, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: the engine did not start:\n{done.stderr[-3000:]}")
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return phases


def commands(tree: Path, caches: Path) -> dict[str, float]:
    """Returns seconds of a checkout's compiled commands, and of a server until it is healthy."""
    from _server import serve

    (model,) = (caches / "vllm-metal" / "models").glob("SmolLM2*[0-9]")
    asked, found = environment(tree, caches), {}
    for command, line in COMMANDS.items():
        words = [word.format(model=model) for word in line]
        begun = time.time()
        subprocess.run(
            [sys.executable, "-c", "from vllm_metal.cli.main import main; main()", *words],
            env=asked,
            capture_output=True,
            check=True,
        )
        found[command] = time.time() - begun
    for which in ("server, first start", "server, second start"):  # for the server's own modules
        begun = time.time()
        options = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**28))
        with serve(str(model), options, caches / "log", 300, asked):
            found[which] = time.time() - begun
    return found


def report(found: dict[str, dict[str, list[Any]]]) -> None:
    """Prints the medians, writes all measurements, and plots the phases."""
    from _shared import table

    bars = {
        f"{which} start, {name}": {
            phase: statistics.median(phases[phase] for phases in runs[which]) for phase in PHASES
        }
        for which in STARTS
        for name, runs in found.items()
    }
    totals = {
        f"{which} start, {name}": statistics.median(sum(phases.values()) for phases in runs[which])
        for which in STARTS
        for name, runs in found.items()
    }
    table(
        ["s, median", *PHASES, "ready"],
        [[name, *parts.values(), totals[name]] for name, parts in bars.items()],
    )
    table(
        ["s, median", *found],
        [
            [command, *(statistics.median(runs[command]) for runs in found.values())]
            for command in (*COMMANDS, "server, first start", "server, second start")
            if all(command in runs for runs in found.values())
        ],
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "start.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(bars, totals)


def draw(bars: dict[str, dict[str, float]], totals: dict[str, float]) -> None:
    """Plots each start as a bar of successive phases into results/start.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.7 * len(bars) + 1.4), layout="constrained")
    names = list(bars)
    lefts = [0.0] * len(names)
    for phase in PHASES:
        widths = [bars[name][phase] for name in names]
        axes.barh(names, widths, left=lefts, label=phase)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, name in enumerate(names):
        axes.text(lefts[place] + 0.4, place, f"{totals[name]:.1f} s", va="center")
    axes.set_xlim(0, max(lefts) * 1.1)
    axes.invert_yaxis()
    axes.set_xlabel("seconds until an engine with SmolLM2-135M is ready")
    figure.legend(ncols=4, loc="outside upper center", frameon=False)
    figure.savefig(RESULTS / "start.png", dpi=120)


if __name__ == "__main__":
    main()
