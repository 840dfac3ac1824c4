# SPDX-License-Identifier: Apache-2.0
"""Measures drafts, prompts and concurrency on a model with recurrent layers and a dense model.

The two models are similar, with random weights: in one, three of four layers use the gated delta
rule with heads of 128 x 128; in the other, all layers are attention. A tiny draft model proposes a
fixed number of drafts. Hardly any are accepted, which does not change the cost of verification. All
engines live in one process and take turns of a few steps, so that a drifting machine affects all
alike. Besides wall-clock times, records CPU times of all threads of the process: with
`OMP_NUM_THREADS=1` other programs affect these little. Prints tables, writes JSON, draws the plot:
`python benchmarks/hybrids.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm_metal.device import blas
from vllm_metal.settings import envs

if envs.requested_device() == "cpu":
    blas.load()  # comes before MLX

from _hybrid_models import CONTEXT, MODELS, VOCABULARY, write_model
from _shared import Prompts, note, table
from vllm import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
TARGETS = ("hybrid", "dense")
DRAFTS = (0, 1, 3, 5)
STREAMS = 16  # concurrent requests, for the larger batches
PROMPT = 512  # tokens; one step
BEGINNING = 32  # prompt tokens of a stream
#: Uncounted steps at the start of a turn: the device may still compute for the previous engine, and
#: two steps of its own may be in flight.
TAKE_UP = 3


@dataclass(frozen=True)
class Time:
    """Milliseconds."""

    wall: float
    cpu: float  # all threads of the process

    @staticmethod
    def of(work: Callable[[], None], count: int = 1) -> Time:
        """Returns the time of `work` divided by `count`."""
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Time(1e3 * wall / count, 1e3 * cpu / count)


class Engine:
    """An in-process engine, driven step by step."""

    def __init__(self, model: Path, draft: Path, num_drafts: int, prompts: Prompts) -> None:
        """
        Args:
            model: folder of the target.
            draft: folder of the draft model.
            num_drafts: drafts per step and request; 0: no draft model.
            prompts: source of its requests' prompts.
        """
        speculation = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": num_drafts,
        }
        self._llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            max_model_len=CONTEXT,
            max_num_seqs=STREAMS,
            max_num_batched_tokens=PROMPT,
            kv_cache_memory_bytes=512 << 20,
            enable_prefix_caching=False,
            use_tqdm_on_load=False,
            speculative_config=speculation if num_drafts else None,
            additional_config={"fixed_draft_length": True, "max_step_ms": None},
            seed=0,
        )
        self._core = self._llm.llm_engine
        self._prompts = prompts
        self._numbers = itertools.count()
        self._running: list[str] = []
        self.draft_rows: list[int] = []  # draft tokens of each step so far
        self.tokens = 0  # generated tokens of its streams
        self._count_drafts()

    def _add(self, length: int, max_tokens: int) -> str:
        name = f"{next(self._numbers)}"
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._core.add_request(name, {"prompt_token_ids": self._prompts.new(length)}, params)
        return name

    def start(self, streams: int) -> None:
        """Starts requests; returns once all of them decode."""
        most = CONTEXT - BEGINNING - max(DRAFTS) - 1
        self._running = [self._add(BEGINNING, most) for _ in range(streams)]
        waiting = set(self._running)
        while waiting:
            waiting -= {output.request_id for output in self._core.step()}

    def stop(self) -> None:
        """Stops the requests."""
        self._core.abort_request(self._running)
        while self._core.has_unfinished_requests():
            self._core.step()
        self._running = []

    def steps(self, count: int) -> Time:
        """Returns the mean time of `count` steps that gave every stream tokens."""
        self._step(TAKE_UP)
        return Time.of(lambda: self._step(count), count)

    def _step(self, count: int) -> None:
        for _ in range(count):
            outputs: list[Any] = []
            while len(outputs) < len(self._running):
                outputs = self._core.step()
            self.tokens = sum(len(output.outputs[0].token_ids) for output in outputs)

    def first_token(self) -> Time:
        """Returns the time until the first token of a new prompt, sent alone."""
        found = Time.of(self._answer)
        while self._core.has_unfinished_requests():
            self._core.step()
        return found

    def _answer(self) -> None:
        self._add(PROMPT, 1)
        while not self._core.step():
            pass

    def _count_drafts(self) -> None:
        """Makes the scheduler record the number of draft tokens."""
        scheduler = self._core.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            drafted = output.scheduled_spec_decode_tokens.values()
            self.draft_rows.append(sum(map(len, drafted)))
            return output

        scheduler.schedule = counted


Engines = dict[tuple[str, int], Engine]
Runs = dict[str, list[Time]]  # one per round
Milliseconds = dict[str, list[float]]


def measure_drafts(engines: Engines, rounds: int, steps: int) -> tuple[Runs, dict[str, Any]]:
    """Returns step times of one stream by model and number of drafts, and draft counts."""
    for engine in engines.values():
        engine.start(1)
        engine.steps(2 * steps)  # for new shapes
    begun = {key: (len(engine.draft_rows), engine.tokens) for key, engine in engines.items()}
    runs: Runs = {}
    for number in range(rounds):
        for (model, drafts), engine in engines.items():
            runs.setdefault(f"{model}, {drafts}", []).append(engine.steps(steps))
        note(f"drafts, round {number + 1} of {rounds}")
    checked = {}
    for (model, drafts), engine in engines.items():
        first, tokens = begun[model, drafts]
        verified = engine.draft_rows[first:]
        checked[f"{model}, {drafts}"] = {
            "drafts_a_step": statistics.mean(verified),
            "tokens_a_step": (engine.tokens - tokens) / (rounds * (steps + TAKE_UP)),
        }
        engine.stop()
    return runs, checked


def measure_prompts(engines: Engines, rounds: int) -> Runs:
    """Returns times to the first token of a prompt, by model."""
    runs: Runs = {}
    for number in range(rounds + 1):
        for model in TARGETS:
            found = engines[model, 0].first_token()
            if number:  # the first one meets new shapes
                runs.setdefault(model, []).append(found)
        note(f"prompts, round {number} of {rounds}")
    return runs


def measure_streams(engines: Engines, rounds: int, steps: int) -> Runs:
    """Returns times of steps without drafts, by model and number of requests."""
    runs: Runs = {}
    for number in range(rounds):
        for model, streams in itertools.product(TARGETS, (1, STREAMS)):
            engine = engines[model, 0]
            engine.start(streams)
            engine.steps(steps // 2)
            runs.setdefault(f"{model}, {streams}", []).append(engine.steps(steps))
            engine.stop()
        note(f"streams, round {number + 1} of {rounds}")
    return runs


def medians(runs: Milliseconds) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in runs.items()}


def draft_share(runs: Milliseconds, model: str) -> float:
    """Returns the cost of four drafts: the median of (step at 5 - step at 1) / plain step."""
    plain, one, five = (runs[f"{model}, {drafts}"] for drafts in (0, 1, 5))
    return statistics.median((c - b) / a for a, b, c in zip(plain, one, five, strict=True))


def show(times: dict[str, Milliseconds], clock: str) -> None:
    """Prints the tables of one clock."""
    steps = medians(times["steps"])
    rows = [[name, *(steps[f"{name}, {k}"] for k in DRAFTS)] for name in TARGETS]
    heads = [f"{clock} ms of a step", *(f"{drafts} drafts" for drafts in DRAFTS), "(5 - 1) / 0"]
    table(heads, [[*row, draft_share(times["steps"], str(row[0]))] for row in rows])
    first = medians(times["first_token"])
    heads = [f"{clock} ms to the first token", *TARGETS, "hybrid / dense"]
    figures = [first[name] for name in TARGETS]
    table(heads, [[f"{PROMPT} tokens", *figures, first["hybrid"] / first["dense"]]])
    streams = medians(times["streams"])
    rows = [[name, *(streams[f"{name}, {count}"] for count in (1, STREAMS))] for name in TARGETS]
    table([f"{clock} ms of a step, no drafts", "1 request", f"{STREAMS} requests"], rows)


def show_drafts(drafts: dict[str, Any]) -> None:
    """Prints draft counts."""
    for name, found in drafts.items():
        print(
            f"{name} drafts: {found['drafts_a_step']:.2f} drafts and "
            f"{found['tokens_a_step']:.2f} tokens a step"
        )


def plot(reports: dict[str, dict[str, Any]], target: Path) -> None:
    """Plots step times by number of drafts as bars.

    Args:
        reports: reports by label, such as "before" and "now".
        target: image file.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(8, 3), sharey=True)
    width = 0.8 / len(reports)
    for axes, model in zip(panels, TARGETS, strict=True):
        for index, (label, report) in enumerate(reports.items()):
            steps = medians(report["wall_ms"]["steps"])
            heights = [steps[f"{model}, {drafts}"] for drafts in DRAFTS]
            places = [at + (index - (len(reports) - 1) / 2) * width for at in range(len(DRAFTS))]
            bars = axes.bar(places, heights, width, label=label)
            axes.bar_label(bars, fmt="%.0f", fontsize=7)
        axes.margins(y=0.1)
        axes.set_title(model)
        axes.set_xticks(range(len(DRAFTS)), [str(drafts) for drafts in DRAFTS])
        axes.set_xlabel("drafts a step")
    panels[0].set_ylabel("ms a step, one stream")
    if len(reports) > 1:
        panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def run(rounds: int, steps: int, scratch: Path) -> dict[str, Any]:
    """Runs all measurements; each result is a list over rounds."""
    parameters = {name: write_model(name, scratch / name) for name in MODELS}
    prompts = Prompts(VOCABULARY)
    engines: Engines = {}
    for drafts, model in itertools.product(DRAFTS, TARGETS):
        engines[model, drafts] = Engine(scratch / model, scratch / "draft", drafts, prompts)
        note(f"engine of the {model} model, {drafts} drafts")
    load = os.getloadavg()[0]
    found, checked = measure_drafts(engines, rounds, steps)
    fewer = max(rounds // 3, 2)
    runs = {
        "steps": found,
        "first_token": measure_prompts(engines, fewer),
        "streams": measure_streams(engines, fewer, steps),
    }
    return {
        "parameters": parameters,
        "steps": steps,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "load": [load, os.getloadavg()[0]],
        "drafts": checked,
        "wall_ms": {part: _of_clock(each, "wall") for part, each in runs.items()},
        "cpu_ms": {part: _of_clock(each, "cpu") for part, each in runs.items()},
    }


def _of_clock(runs: Runs, clock: str) -> Milliseconds:
    return {name: [getattr(found, clock) for found in of] for name, of in runs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each engine")
    parser.add_argument("--steps", type=int, default=10, help="steps per turn")
    parser.add_argument("--quick", action="store_true", help="three rounds of five steps")
    parser.add_argument("--before", type=Path, help="JSON of an earlier run, for the picture")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(arguments)
    rounds, steps = (3, 5) if args.quick else (args.rounds, args.steps)
    with tempfile.TemporaryDirectory() as name:
        report = run(rounds, steps, Path(name))
    for clock in ("wall", "cpu"):
        show(report[f"{clock}_ms"], clock)
    show_drafts(report["drafts"])
    reports = {"now": report}
    if args.before is not None:
        report["before"] = json.loads(args.before.read_text())
        reports = {"before": report["before"], **reports}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "hybrids.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(reports, args.out / "hybrids.png")
    print(f"wrote {args.out / 'hybrids.json'} and .png", file=sys.stderr)


if __name__ == "__main__":
    main()
