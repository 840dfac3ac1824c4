# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm` as the server of a command, on the command's socket, until the command ends.

`python -m vllm_metal.cli.own_server LIFELINE LISTENER ARGUMENTS...`: LIFELINE is the read end of a
pipe that closes when the command ends; LISTENER is a socket that already listens, or -1 to listen
where the arguments say.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

#: Seconds that a server may take to end. Its engine may take 60 on a Mac (vllm_patches.shutdown).
STOP_S = 90.0 if sys.platform == "darwin" else 30.0


@contextmanager
def lifeline() -> Iterator[int]:
    """Yields the read end of a pipe that closes with the block, or with this process."""
    # A pipe closes even if this process is killed with SIGKILL; macOS has no signal for that.
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


def follow(given: int) -> None:
    """Ends this process and its group once the write end of the pipe `given` is closed."""
    Thread(target=_end_with, args=(given,), name="Lifeline", daemon=True).start()


def _end_with(read_end: int) -> None:
    while os.read(read_end, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    if os.getpgrp() == os.getpid():  # else the group includes other processes
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _listen_on(descriptor: int) -> None:
    from vllm.entrypoints.launchers import launcher

    # The socket listens before the server starts, so that nobody else can answer in its place.
    def listener(*args: Any, **options: Any) -> socket.socket:
        return socket.socket(fileno=descriptor)

    launcher.create_server_socket = listener
    launcher.create_server_unix_socket = listener


def main() -> None:
    read_end, listener, *arguments = sys.argv[1:]
    follow(int(read_end))
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main as vllm

    if int(listener) >= 0:
        _listen_on(int(listener))
    vllm()


if __name__ == "__main__":
    main()
