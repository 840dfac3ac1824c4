# SPDX-License-Identifier: Apache-2.0
"""Measures the prefix cache with vLLM's prefix_repetition benchmark, in three states.

Prompts share their first tokens. States: cache off; cold (on but empty: the shared prefix is found
from the second prompt on); warm (a second pass, which finds whole prompts). Prints a table, and
writes results as JSON and a plot.
"""

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from _server import VLLM, Server, ServerError, serve

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # defines the default model

import _common  # noqa: E402
import _terminal  # noqa: E402

WAYS = ("off", "cold", "warm")
# Published gain of a warm cache over none for this workload on a Mac.
PUBLISHED_THROUGHPUT_RATIO = 1.37
PUBLISHED_TTFT_RATIO = 1.43
# Limits `vllm bench serve`, in seconds, in case the server hangs.
BENCH_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Workload:
    """Sizes of the benchmark; lengths in tokens."""

    num_prompts: int = 50
    prefix_len: int = 512
    suffix_len: int = 128
    num_prefixes: int = 1
    output_len: int = 100

    def arguments(self) -> list[str]:
        """Options of `vllm bench serve`."""
        sizes = {
            "--num-prompts": self.num_prompts,
            "--prefix-repetition-prefix-len": self.prefix_len,
            "--prefix-repetition-suffix-len": self.suffix_len,
            "--prefix-repetition-num-prefixes": self.num_prefixes,
            "--prefix-repetition-output-len": self.output_len,
        }
        return [text for name, size in sizes.items() for text in (name, str(size))]

    def max_model_len(self) -> int:
        """A context for each request; retokenizing a prompt may lengthen it a little."""
        return self.prefix_len + self.suffix_len + self.output_len + 128


QUICK = Workload(num_prompts=12, output_len=24)


@dataclass(frozen=True)
class Run:
    """Metrics of one run; times in milliseconds."""

    throughput: float  # output tokens per second
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    e2el_p50: float
    hit_rate: float | None  # of looked-up prompt tokens; None: none were looked up

    @classmethod
    def read(cls, result: dict[str, float], queries: float, hits: float) -> "Run":
        """Reads the JSON of `vllm bench serve` and the growth of the server's counters."""
        return cls(
            throughput=result["output_throughput"],
            ttft_mean=result["mean_ttft_ms"],
            ttft_p50=result["p50_ttft_ms"],
            ttft_p99=result["p99_ttft_ms"],
            tpot_p50=result["p50_tpot_ms"],
            tpot_p99=result["p99_tpot_ms"],
            e2el_p50=result["p50_e2el_ms"],
            hit_rate=hits / queries if queries else None,
        )


@dataclass(frozen=True)
class Figure:
    """Median of a metric over the repeats, and its standard deviation for at least two."""

    median: float
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> "Figure | None":
        """Returns None if no run has the metric."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.median(known), statistics.stdev(known) if len(known) > 1 else None)

    def text(self, scale: float, digits: int) -> str:
        """Formats the metric times `scale` as ``median ± sd``."""
        spread = "" if self.sd is None else f" ± {scale * self.sd:.{digits}f}"
        return f"{scale * self.median:.{digits}f}{spread}"


Summary = dict[str, dict[str, Figure | None]]  # by state, then metric


def summarize(runs: dict[str, list[Run]]) -> Summary:
    """Returns each state's metrics over its runs."""
    return {
        way: {
            name: Figure.of([getattr(run, name) for run in of_way])
            for name in Run.__dataclass_fields__
        }
        for way, of_way in runs.items()
    }


def gain(summary: Summary, name: str, way: str = "warm") -> float:
    """Returns the improvement of the median of `name` over cache off; above 1 is better.

    Higher is better for the throughput, lower for all times.
    """
    off, on = summary["off"][name], summary[way][name]
    assert off is not None and on is not None
    return on.median / off.median if name == "throughput" else off.median / on.median


class Bench:
    """Runs `vllm bench serve`; writes its output and the servers' to files in `logs`."""

    def __init__(self, workload: Workload, logs: Path) -> None:
        self._workload = workload
        self._logs = logs

    def run(self, server: Server, way: str, seed: int) -> Run:
        """Runs once against `server`; equal seeds give equal prompts.

        Raises:
            ServerError: the benchmark or one of its requests failed.
        """
        name = f"bench-{way}-{seed}"
        result_file, log = self._logs / f"{name}.json", self._logs / f"{name}.log"
        command = [*VLLM, "bench", "serve", "--base-url", server.url, "--model", server.model]
        command += ["--dataset-name", "prefix_repetition", *self._workload.arguments()]
        # Answers must have the same length whatever they say.
        command += ["--ignore-eos", "--temperature", "0", "--seed", str(seed)]
        command += ["--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,99"]
        command += ["--save-result", "--result-dir", str(self._logs)]
        command += ["--result-filename", result_file.name]
        before = server.prefix_counters()
        with log.open("w") as output:
            # Show its progress bar (stderr) in a terminal.
            errors = None if sys.stderr.isatty() else subprocess.STDOUT
            done = subprocess.run(command, stdout=output, stderr=errors, timeout=BENCH_TIMEOUT_S)
        if done.returncode != 0:
            raise ServerError(f"vllm bench serve exited with {done.returncode}; see {log}")
        result = json.loads(result_file.read_text())
        if result["completed"] != self._workload.num_prompts:
            raise ServerError(
                f"{result['completed']} of {self._workload.num_prompts} requests were answered; "
                f"see {log} and {server.log}"
            )
        after = server.prefix_counters()
        return Run.read(result, after[0] - before[0], after[1] - before[1])


def measure(args: argparse.Namespace, model: str, workload: Workload) -> dict[str, list[Run]]:
    """Returns all runs by state, `args.repeats` each."""
    logs: Path = args.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    bench = Bench(workload, logs)
    options = ["--max-model-len", str(workload.max_model_len()), *args.serve_options]
    options += ["--kv-cache-memory-bytes", str(int(args.kv_cache_gib * 2**30))]
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}

    def run(server: Server, way: str, seed: int) -> None:
        runs[way].append(bench.run(server, way, seed))
        newest = runs[way][-1]
        _note(
            f"{way}, run {seed + 1} of {args.repeats}: {newest.throughput:.1f} tok/s, "
            f"mean TTFT {newest.ttft_mean:.0f} ms"
        )

    for caching in (False, True):
        flag = "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"
        _note(f"starting vllm serve {flag}")
        log = logs / f"serve-{'on' if caching else 'off'}.log"
        with serve(model, [*options, flag], log, args.start_timeout) as server:
            server.warm_up()
            _note(f"serving at {server.url}")
            for seed in range(args.repeats):
                if not caching:
                    run(server, "off", seed)
                    continue
                server.forget_prefixes()
                run(server, "cold", seed)
                run(server, "warm", seed)
    return runs


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    header: str
    digits: int
    scale: float = 1.0

    def cell(self, figures: dict[str, Figure | None]) -> str:
        """Formats the metric; a dash if there is none."""
        figure = figures[self.name]
        return "–" if figure is None else figure.text(self.scale, self.digits)


ROWS = (
    Row("throughput", "output tok/s", 1),
    Row("ttft_mean", "TTFT mean, ms", 0),
    Row("ttft_p50", "TTFT P50, ms", 0),
    Row("ttft_p99", "TTFT P99, ms", 0),
    Row("tpot_p50", "TPOT P50, ms", 1),
    Row("tpot_p99", "TPOT P99, ms", 1),
    Row("e2el_p50", "E2EL P50, ms", 0),
    Row("hit_rate", "hit rate, %", 1, scale=100),
)


_started = time.monotonic()


def _note(text: str) -> None:
    _terminal.say(f"[{time.monotonic() - _started:5.0f} s] {text}", "dim")


def report(summary: Summary, out: Path, setting: dict[str, object]) -> None:
    """Prints the table and the gains; writes them and a plot to `out`."""
    print()
    _terminal.table(
        ["prefix cache", *WAYS],
        [[row.header, *(row.cell(summary[way]) for way in WAYS)] for row in ROWS],
    )
    throughput, ttft = gain(summary, "throughput"), gain(summary, "ttft_mean")
    print(f"warm over off: throughput {throughput:.2f}× (published {PUBLISHED_THROUGHPUT_RATIO}×)")
    print(f"warm over off: mean TTFT  {ttft:.2f}× (published {PUBLISHED_TTFT_RATIO}×)")
    figures_by_way = {
        way: {name: figure and asdict(figure) for name, figure in figures.items()}
        for way, figures in summary.items()
    }
    gains = {"throughput": throughput, "ttft_mean": ttft}
    target = out / "prefix_repetition.json"
    target.write_text(
        json.dumps({**setting, "gain": gains, "summary": figures_by_way}, indent=2) + "\n"
    )
    plot(summary, target.with_suffix(".png"))
    print(f"written: {target} and {target.with_suffix('.png').name}")


def plot(summary: Summary, target: Path) -> None:
    """Plots throughput and mean TTFT by state as bars with standard deviations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, panels = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    titles = {"throughput": "output tokens per second", "ttft_mean": "mean time to first token, ms"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        figures = [summary[way][name] for way in WAYS]
        heights = [figure.median if figure else 0.0 for figure in figures]
        spreads = [
            figure.sd if figure and figure.sd else math.nan for figure in figures
        ]  # nan: none
        bars = panel.bar(WAYS, heights, yerr=spreads, capsize=4, color=["0.7", "C0", "C2"])
        labels = [f"{height:.0f}" if height >= 100 else f"{height:.1f}" for height in heights]
        panel.bar_label(bars, labels, padding=3)
        panel.margins(y=0.1)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    canvas.supxlabel("prefix cache")
    canvas.savefig(target, dpi=150)
    pyplot.close(canvas)


def main() -> int:
    args = _parse_args()
    if find_spec("matplotlib") is None:  # check before minutes are spent
        print(
            "prefix_repetition: matplotlib is missing; install the 'bench' extra: "
            f"{sys.executable} -m pip install -e '.[bench]'",
            file=sys.stderr,
        )
        return 1
    # SIGTERM must also stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    workload = QUICK if args.quick else Workload()
    device = _common.prepare(offline=args.model is None)
    try:
        model = args.model or str(_common.default_model())
        runs = measure(args, model, workload)
    except (ServerError, ImportError, OSError, subprocess.TimeoutExpired) as error:
        print(f"prefix_repetition: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("prefix_repetition: interrupted; the servers are stopped", file=sys.stderr)
        return 130
    setting: dict[str, object] = {
        "model": Path(model).name,
        "device": device,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {name: version(name) for name in ("vllm", "mlx", "mlx-lm")},
        "workload": asdict(workload),
        "runs": {way: [asdict(run) for run in of_way] for way, of_way in runs.items()},
    }
    report(summarize(runs), args.out, setting)
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory or Hub name; default: the embedded model")
    parser.add_argument("--quick", action="store_true", help="few short requests, once")
    parser.add_argument("--repeats", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--kv-cache-gib",
        type=float,
        default=2.0,  # 50 requests of 740 tokens of the embedded model in float32 take 1.6
        help="memory of the KV cache; it should hold all requests at once (default: %(default)s)",
    )
    parser.add_argument(
        "--start-timeout", type=float, default=600.0, help="maximum seconds until a server answers"
    )
    parser.add_argument(
        "serve_options", nargs="*", metavar="-- OPTION", help="more options for vllm serve"
    )
    args = parser.parse_args()
    if args.repeats is None:
        args.repeats = 1 if args.quick else 3
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
