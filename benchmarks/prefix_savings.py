# SPDX-License-Identifier: Apache-2.0
"""Measures prefix cache savings for a system prompt, a four-turn chat, and document questions.

Two engines in one process, with and without the prefix cache, take turns at the same requests, one
at a time. Prints a table, writes JSON:
`python benchmarks/prefix_savings.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from _engine import Engine  # first, because it configures how vLLM and MLX start
from _savings_runs import HEADERS, LONGEST, compare
from _shared import Prompts, note, table

from vllm_metal.engine.models.embedded import embedded_model_path

ROOT = Path(__file__).resolve().parents[1]
_POOL = 48000 * 2 * LONGEST  # bytes; SmolLM2 takes 46,080 a token


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder; default: SmolLM2-135M in float32")
    parser.add_argument(
        "--vocabulary", type=int, default=40000, help="number of token ids to draw from"
    )
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args(arguments)
    before = os.getloadavg()[0]
    model = args.model or str(embedded_model_path(dequantize=True))
    off = Engine(model, LONGEST + 16, _POOL, None, prefix_caching=False)
    on = Engine(model, LONGEST + 16, _POOL, None)
    savings = compare(off, on, Prompts(args.vocabulary), args.repeats)
    table(HEADERS, [[name, *asdict(saving).values()] for name, saving in savings.items()])
    args.out.mkdir(parents=True, exist_ok=True)
    target = args.out / "prefix_savings.json"
    found = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "load": (before, os.getloadavg()[0]),
        "repeats": args.repeats,
        "results": {name: asdict(saving) for name, saving in savings.items()},
    }
    target.write_text(json.dumps(found, indent=2) + "\n")
    note(f"wrote {target}")


if __name__ == "__main__":
    main()
