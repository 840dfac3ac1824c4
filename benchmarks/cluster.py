# SPDX-License-Identifier: Apache-2.0
"""Measures replicas of a model, and a model split over two hosts, against estimates.

Replicas: cached share of a trace with shared prefixes, and requests per second. Pipeline and tensor
parallel on two hosts, which are network namespaces: bytes across the link, and waiting time of
ranks. Starts real servers of a toy model:

    python benchmarks/cluster.py
    python benchmarks/cluster.py --parts replicas --replicas 2 4

Skips what this platform or machine does not support, with the reason.
"""

from __future__ import annotations

import vllm_metal.platform.metal_platform  # noqa: F401  # first: it loads a BLAS before MLX

# isort: split
import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import _cluster_ranks
import _cluster_replicas
from _server import ServerError, in_short
from _shared import note, table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for the tests' hosts
PARTS = ("replicas", "layers", "heads")


def report_replicas(rows: Sequence[dict]) -> None:
    """Prints a row for each configuration."""
    headers = tuple(rows[0])
    table(headers, [tuple(row.values()) for row in rows])
    cores = len(os.sched_getaffinity(0))
    print(
        f"Each server had one of {cores} processors, and shared it where there were more servers."
    )


def report_bytes(found: dict) -> None:
    """Prints the bytes across the link and their lower bound."""
    headers = ("bytes across the link", "second host got", "second host sent", "estimated")
    rows = [
        ("a row", found["got_a_row"], found["sent_a_row"], found["estimated"]),
        ("a step besides", found["got_a_step"], found["sent_a_step"], "–"),
    ]
    table(headers, rows)
    print(f"Nothing asked: {found['idle']:.0f} bytes a second, both ways, which are taken off.")


def report_layers(found: dict) -> None:
    """Prints bytes, and waiting time by number of streams."""
    report_bytes(found["bytes"])
    rows = [
        tuple(
            f"{100 * value:.0f} %" if isinstance(value, float) and "ms" not in name else value
            for name, value in row.items()
        )
        for row in found["waiting"]
    ]
    table(tuple(found["waiting"][0]), rows)
    print("Ranks wait 1 - (ms of one engine) / (2 × ms of both). A host has one processor.")


def report_heads(found: dict) -> None:
    """Prints bytes and time per token."""
    report_bytes(found["bytes"])
    print(f"A token takes {found['ms a token']:.3g} ms at one stream. A host has one processor.")


def on_hosts(measure: Callable[[Sequence, Path], dict], folder: Path) -> dict:
    """Runs a measurement on two hosts.

    Raises:
        ServerError: hosts or an engine on them could not be started.
    """
    try:
        from network.hosts import hosts, why_not
    except ImportError as error:
        raise ServerError(f"hosts need the developers' part: {error}") from error
    if (reason := why_not()) is not None:
        raise ServerError(reason)
    with hosts(2, rate=_cluster_ranks.RATE) as two:
        return measure(two, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--replicas", nargs="+", type=int, default=[2])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--logs", type=Path, help="folder to keep the servers' logs in")
    args = parser.parse_args()
    target = args.out / "cluster.json"
    kept = json.loads(target.read_text()) if target.exists() else {}
    kept["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    for part in args.parts:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="cluster-") as name:
            folder = Path(name)
            try:
                if part == "replicas":
                    found = list(_cluster_replicas.measure(args.replicas, folder))
                    if not found:
                        raise ServerError("no server started")
                    report_replicas(found)
                elif part == "layers":
                    found = on_hosts(_cluster_ranks.by_layers, folder)
                    report_layers(found)
                else:
                    found = on_hosts(_cluster_ranks.by_heads, folder)
                    report_heads(found)
            except ServerError as error:
                print(f"{part}: skipped: {in_short(error)}")
                continue
            finally:
                _keep(folder, args.logs)
        kept[part] = found
        kept["load"] = kept.get("load", {}) | {part: (load, os.getloadavg()[0])}
    args.out.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept, indent=2, allow_nan=False) + "\n")
    note(f"wrote {target}")


def _keep(folder: Path, logs: Path | None) -> None:
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            (logs / log.name).write_bytes(log.read_bytes())


if __name__ == "__main__":
    main()
