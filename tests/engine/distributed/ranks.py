# SPDX-License-Identifier: Apache-2.0
"""Runs a test module in processes that share a ring, like an engine's ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

LIMIT_S = 600
TESTS = Path(__file__).parents[2]


def run(module: str, folder: Path, size: int = 2, arguments: Sequence[str] = ()) -> list[str]:
    """Returns each rank's standard output.

    Args:
        module: module for `python -m` in each process, which finds MLX's ring in its variables.
        folder: folder for the ring's file.
        size: number of ranks.
        arguments: the module's arguments.

    Raises:
        AssertionError: a rank failed; the message has its output.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(size)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            each.bind(("127.0.0.1", 0))
        hostfile = folder / "hosts.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{s.getsockname()[1]}"] for s in held]))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=TESTS,  # so that its modules are found
                env=os.environ | {"MLX_HOSTFILE": str(hostfile), "MLX_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            ended = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, errors) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, errors[-4000:]
    return [out for out, _ in ended]
