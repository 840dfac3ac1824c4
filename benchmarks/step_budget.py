# SPDX-License-Identifier: Apache-2.0
"""Measures how a long prompt and a stream slow each other, with and without max_step_ms.

Two engines in one process take turns. Each computes a prompt alone, then beside a decoding stream.
Measures the time between the stream's tokens, idle and beside the prompt, and the prompt's rate,
alone and beside the stream. Prints a table, writes JSON: `python benchmarks/step_budget.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import _engine  # first, because it configures how vLLM and MLX start
from _budget_runs import HEADERS, MOST_STREAMED, STREAM_PROMPT, compare
from _engine import Engine
from _shared import Prompts, note, table

from vllm_metal.engine.models.embedded import embedded_model_path
from vllm_metal.settings.additional_config import AdditionalConfig

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    default = AdditionalConfig().max_step_ms
    assert default is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a prompt of 2,000 tokens, once")
    parser.add_argument("--toy", action="store_true", help="a model with little to compute")
    parser.add_argument("--model", help="folder; default: SmolLM2-135M in float32")
    parser.add_argument("--tokens", type=int, help="tokens of the prompt; default: 8000")
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
        context = max(length, MOST_STREAMED) + 2 * STREAM_PROMPT
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
