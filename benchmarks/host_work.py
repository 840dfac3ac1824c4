# SPDX-License-Identifier: Apache-2.0
"""Counts what a decode step asks of the host beside a GPU, and of another commit's: nothing runs.

    python benchmarks/host_work.py [--before FOLDER]

FOLDER is a checkout of the other commit, `git worktree add FOLDER COMMIT` say. For models of so
many layers of Llama: operations that MLX creates and walks to in the model's forward; dispatches
and command buffers, see tests/dispatches.py; bytes of kernels' text, which MLX hashes at each
dispatch of theirs; and buffers that it binds to them. To be told of errors takes one command buffer
more where `one more` says so.
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
#: Dispatches of a command buffer: as on M1 to M4, and MLX's own of Max and Ultra.
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
    """Gets the length of the text of each kernel that is called, and how many buffers it has.

    MLX binds a buffer more for the shape of an input, where the text mentions it.
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
    """Of a step of the tree that Python finds first."""
    from importlib.util import find_spec

    from tests import dispatches

    with counted_kernels() as called:
        graph = dispatches.graph_of("llama", layers)
    step = dispatches.dispatches(graph)
    opaque = sum(operation.opaque for operation in graph.operations)
    early = find_spec("vllm_metal.engine.worker.early_reads") is not None
    return {
        # Each kernel is recorded with the zeros that stand for its outputs.
        "operations": sum(operation.kind != "Full" for operation in graph.operations),
        "dispatches": step,
        **{f"buffers of {limit}": math.ceil(step / limit) for limit in LIMITS},
        "one more": "where the device is slower" if early else "always",
        "bytes": sum(length for length, _ in called),
        "bound": sum(bound for _, bound in called),
        "kernels": opaque,
    }


def counts_of(tree: Path) -> dict[str, dict[str, int | str]]:
    """By layers, of another tree, in a process of its own."""
    paths = os.pathsep.join(map(str, (tree, tree / "tests")))
    variables = os.environ | {"PYTHONPATH": paths, "VLLM_METAL_DEVICE": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--json"]
    told = subprocess.run(command, env=variables, cwd=tree, capture_output=True, check=True)
    found: dict[str, dict[str, int | str]] = json.loads(told.stdout.splitlines()[-1])
    return found


def table(found: dict[str, dict[str, dict[str, int | str]]]) -> str:
    """Layers and trees down, counts across."""
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
