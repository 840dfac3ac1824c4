# SPDX-License-Identifier: Apache-2.0
"""Measures the host time of the attention kernels' plans, per step and kind of layer.

Needs no GPU. `--before ../before` alternates with another checkout, each run in its own process.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

_HERE = Path(__file__).resolve().parents[1]
_CALLS, _ROUNDS, _BLOCK = 100, 7, 16


def batches() -> dict[str, list[tuple[int, int]]]:
    """Returns (context, rows of this step) of each request, by batch."""
    rng = np.random.default_rng(0)
    ragged = [(int(length), 1) for length in rng.integers(100, 4000, 32)]
    return {
        "1 × 100": [(100, 1)],
        "1 × 8192": [(8192, 1)],
        "8 × 1000": [(1000, 1)] * 8,
        "32 × 100 to 4000": ragged,
        "31 × 1000, 1 × 65536": [(1000, 1)] * 31 + [(65536, 1)],
        "256 × 1000": [(1000, 1)] * 256,
        "a prompt of 2048": [(2048, 2048)],
        "31 decodes, 512 rows of a prompt": [*ragged[:31], (600, 512)],
    }


def shared() -> dict[str, tuple[list[tuple[int, int]], int]]:
    """Like `batches`, with the number of positions that all requests share at the start."""
    return {
        "8 × 1000, 800 in common": ([(1000, 1)] * 8, 800),
        "32 × 4000, 3200 in common": ([(4000, 1)] * 32, 3200),
        "256 × 1000, 800 in common": ([(1000, 1)] * 256, 800),
    }


def measure() -> dict[str, float]:
    """Returns microseconds per plan for Llama 8B's heads: medians of CPU time."""
    from metal_kernels.paged_attention import AttentionShape, plan

    shape, found = AttentionShape(32, 8, 128, 128), {}
    told = {"block_size": _BLOCK} if "block_size" in inspect.signature(plan).parameters else {}
    apart = {name: (requests, 0) for name, requests in batches().items()}
    for name, (requests, common) in (apart | shared()).items():
        lens, rows = (np.array(part, np.int32) for part in zip(*requests, strict=True))
        starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        width = -(-int(lens.max()) // _BLOCK)
        tables = np.arange(len(lens) * width, dtype=np.int32).reshape(len(lens), width)
        tables[:, : common // _BLOCK] = tables[0, : common // _BLOCK]
        rounds = []
        for _ in range(_ROUNDS + 1):  # the first one warms caches
            started = time.thread_time()
            for _ in range(_CALLS):
                plan(starts, lens, tables, shape, **told)
            rounds.append((time.thread_time() - started) / _CALLS * 1e6)
        found[name] = float(np.median(rounds[1:]))
    return found


def _measure_in(checkout: Path) -> dict[str, float]:
    """Measures a checkout in its own process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--json"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(said.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout to measure in turn")
    parser.add_argument("--repeats", type=int, default=5, help="number of repeats")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure()))
        return
    checkouts = {"now": _HERE} if args.before is None else {"before": args.before, "now": _HERE}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(args.repeats):
        for name, checkout in checkouts.items():
            runs[name].append(_measure_in(checkout.resolve()))
    print(f"| µs of a plan | {' | '.join(checkouts)} |")
    print("| --- |" + " ---: |" * len(checkouts))
    for batch in (*batches(), *shared()):
        cells = [f"{np.median([run[batch] for run in runs[name]]):.0f}" for name in checkouts]
        print(f"| {batch} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
