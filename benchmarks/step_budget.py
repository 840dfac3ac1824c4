# SPDX-License-Identifier: Apache-2.0
"""What a long prompt costs a stream, and the stream the prompt, with steps bounded by time and not.

Two engines in one process take turns. On each, a prompt is computed alone, then beside a stream
that decodes: the time between the stream's tokens, idle and beside the prompt, and the prompt's
rate, alone and beside the stream. Prints a table, writes JSON: `python benchmarks/step_budget.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import _engine  # comes first: it settles how vLLM and MLX start
from _engine import Engine
from _kv_streams import Gaps, Stream
from kv_disk import ROOT, Prompts, note, table

from vllm_metal.models.embedded import embedded_model_path
from vllm_metal.settings.additional_config import AdditionalConfig

_STREAM_PROMPT = 60  # tokens
_MOST_STREAMED = 4000  # tokens of the stream, more than there are steps


@dataclass
class Runs:
    """What one engine took; times in seconds."""

    idle: list[float] = field(default_factory=list)  # between the stream's tokens
    beside: list[float] = field(default_factory=list)  # the same while a prompt is computed
    alone_rates: list[float] = field(default_factory=list)  # tokens a second, of each prompt
    beside_rates: list[float] = field(default_factory=list)

    def measure(self, engine: Engine, prompts: Prompts, length: int, idle_tokens: int) -> None:
        """Adds a run with texts that the engine does not know."""
        engine.settle()
        engine.forget()
        self.alone_rates.append(length / engine.first_token(prompts.new(length)).seconds)
        engine.forget()
        stream = Stream(engine, prompts.new(_STREAM_PROMPT), _MOST_STREAMED)
        stream.tokens(idle_tokens, self.idle)
        name, others, started = engine.add(prompts.new(length)), set[str](), time.perf_counter()
        while name not in others:
            others = stream.token(self.beside)
        self.beside_rates.append(length / (time.perf_counter() - started))
        stream.stop()


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    idle_p50_ms: float
    idle_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    p99_ratio: float
    steps: float  # that a prompt took beside the stream
    alone_tokens_per_s: float
    beside_tokens_per_s: float
    rate_ratio: float

    @staticmethod
    def of(runs: Runs) -> Result:
        """Percentiles of all gaps; medians of rates."""
        idle, beside = Gaps.of(runs.idle), Gaps.of(runs.beside)
        rates = statistics.median(runs.alone_rates), statistics.median(runs.beside_rates)
        return Result(
            idle.p50,
            idle.p99,
            beside.p50,
            beside.p99,
            beside.p99 / idle.p99,
            beside.number / len(runs.beside_rates),
            *rates,
            rates[1] / rates[0],
        )


HEADERS = (
    "steps",
    "idle p50, ms",
    "idle p99",
    "beside p50",
    "beside p99",
    "p99, ratio",
    "steps a prompt",
    "alone, tok/s",
    "beside, tok/s",
    "rate, ratio",
)


def compare(
    engines: Mapping[str, Engine], prompts: Prompts, length: int, repeats: int, idle_tokens: int
) -> dict[str, Result]:
    """Results by engine, which take turns at being first."""
    runs = {name: Runs() for name in engines}
    for engine in engines.values():
        engine.first_token(prompts.new(length // 8))
    for number in range(repeats):
        order = list(engines) if number % 2 == 0 else list(engines)[::-1]
        for name in order:
            runs[name].measure(engines[name], prompts, length, idle_tokens)
            note(f"{name}: {Result.of(runs[name])}")
    return {name: Result.of(of_engine) for name, of_engine in runs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    default = AdditionalConfig().max_step_ms
    assert default is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a prompt of 2,000 tokens, once")
    parser.add_argument("--toy", action="store_true", help="a model with little to compute")
    parser.add_argument("--model", help="folder; default: SmolLM2-135M in float32")
    parser.add_argument("--tokens", type=int, help="of the prompt; default: 8000")
    parser.add_argument("--repeats", type=int, help="default: 5")
    parser.add_argument("--max-step-ms", type=float, default=default, help=f"default: {default:g}")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(arguments)
    length = args.tokens or (2000 if args.quick else 8000)
    repeats = args.repeats or (1 if args.quick else 5)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        model = args.model or str(embedded_model_path(dequantize=True))
        prompts = Prompts(40000)
        if args.toy:
            model, prompts = _engine.write_toy(Path(name)), Prompts(_engine.TOY_VOCABULARY)
        context = max(length, _MOST_STREAMED) + 2 * _STREAM_PROMPT
        pool = 48000 * 2 * context  # bytes; SmolLM2 takes 46,080 a token
        engines = {
            "not bounded": Engine(model, context, pool, None),
            f"{args.max_step_ms:g} ms": Engine(model, context, pool, None, args.max_step_ms),
        }
        results = compare(engines, prompts, length, repeats, idle_tokens=100)
    table(HEADERS, [[name, *asdict(result).values()] for name, result in results.items()])
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / f"step_budget{'_toy' if args.toy else ''}.json"
    found = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "load": (before, os.getloadavg()[0]),
        "tokens": length,
        "repeats": repeats,
        "results": {name: asdict(result) for name, result in results.items()},
    }
    target.write_text(json.dumps(found, indent=2) + "\n")
    note(f"wrote {target}")


if __name__ == "__main__":
    main()
