# SPDX-License-Identifier: Apache-2.0
"""Counts a GPU decode step's work on the host, also for another commit; runs nothing.

    python benchmarks/host_work.py [--before FOLDER]

FOLDER is a checkout of the other commit, such as from `git worktree add FOLDER COMMIT`. For Llama
models by number of layers: MLX operations created in the forward pass; dispatches and command
buffers (see tests/dispatches.py); bytes of kernel text, which MLX hashes at each dispatch; and
buffers bound. Error reporting takes one more command buffer where `one more` says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (28, 36, 64)
#: Dispatches per command buffer: on M1 to M4, and MLX's defaults of Max and Ultra.
LIMITS = (84, 50)
COLUMNS = {
    "operations": "host operations",
    "dispatches": "dispatches",
    **{f"buffers of {limit}": f"command buffers of {limit}" for limit in LIMITS},
    "one more": "one more, for errors",
    "bytes": "bytes hashed",
    "bound": "buffers bound to kernels",
}


@contextmanager
def counted_kernels() -> Iterator[list[tuple[int, int]]]:
    """Records the text length and buffers of each kernel that is called.

    MLX binds one more buffer for an input's shape if the text mentions it.
    """
    from metal_kernels.kernel import Kernel

    found: list[tuple[int, int]] = []
    call = Kernel.__call__

    def noted(kernel: Kernel, **options: Any) -> Any:
        shapes = sum(f"{name}_shape" in kernel.body for name in kernel.input_names)
        bound = len(kernel.input_names) + len(kernel.output_names) + shapes
        found.append((len(kernel.header) + len(kernel.body), bound))
        return call(kernel, **options)

    Kernel.__call__ = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Kernel.__call__ = call  # type: ignore[method-assign]


def count(layers: int) -> dict[str, int | str]:
    """Counts a step of the tree that comes first on Python's path."""
    from importlib.util import find_spec

    from tests import dispatches

    with counted_kernels() as called:
        graph = dispatches.graph_of("llama", layers)
    step = dispatches.dispatches(graph)
    opaque = sum(operation.opaque for operation in graph.operations)
    early = find_spec("vllm_metal.engine.worker.early_reads") is not None
    return {
        # Each kernel is recorded together with the zeros for its outputs.
        "operations": sum(operation.kind != "Full" for operation in graph.operations),
        "dispatches": step,
        **{f"buffers of {limit}": math.ceil(step / limit) for limit in LIMITS},
        "one more": "where the device is slower" if early else "always",
        "bytes": sum(length for length, _ in called),
        "bound": sum(bound for _, bound in called),
        "kernels": opaque,
    }


def counts_of(tree: Path) -> dict[str, dict[str, int | str]]:
    """Counts by number of layers in another tree, in its own process."""
    paths = os.pathsep.join(map(str, (tree, tree / "tests")))
    variables = os.environ | {"PYTHONPATH": paths, "VLLM_METAL_DEVICE": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--json"]
    told = subprocess.run(command, env=variables, cwd=tree, capture_output=True, check=True)
    found: dict[str, dict[str, int | str]] = json.loads(told.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, dict[str, int | str]]]) -> str:
    """Formats layers and trees as rows, counts as columns."""
    lines = ["| layers | | " + " | ".join(COLUMNS.values()) + " |"]
    lines.append("| ---: | --- |" + " ---: |" * len(COLUMNS))
    for layers in map(str, LAYERS):
        for tree, counts in found.items():
            cells = (counts[layers][name] for name in COLUMNS)
            texts = [f"{cell:,}" if isinstance(cell, int) else cell for cell in cells]
            lines.append(f"| {layers} | {tree} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of another commit")
    parser.add_argument("--json", action="store_true", help="print the counts of this tree alone")
    args = parser.parse_args()
    if args.json:
        print(json.dumps({layers: count(layers) for layers in LAYERS}))
        return
    trees = ({"before": args.before} if args.before else {}) | {"now": ROOT}
    print(table({name: counts_of(tree.resolve()) for name, tree in trees.items()}))


if __name__ == "__main__":
    main()
