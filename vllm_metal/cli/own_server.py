# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm` as the server of a command: on the command's listener, and no longer than it lives.

`python -m vllm_metal.cli.own_server LIFELINE LISTENER ARGUMENTS...`, where LIFELINE is a
pipe's descriptor that is at its end when the command has ended, also by SIGKILL (macOS has no
signal for that), and LISTENER that of a socket that listens already, so that nobody else can answer
in the server's place while it starts; -1: the server listens where its arguments say.
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

#: Seconds that a server may take to end: its engine may take 60 on a Mac (vllm_patches.shutdown).
STOP_S = 90.0 if sys.platform == "darwin" else 30.0


@contextmanager
def lifeline() -> Iterator[int]:
    """A pipe's end for reading, to give to a server: it is at its end once this process has ended,
    or the block."""
    given, ours = os.pipe()
    try:
        yield given
    finally:
        os.close(given)
        os.close(ours)


def follow(given: int) -> None:
    """Ends this process and its group when the pipe's other end is closed.

    Args:
        given: descriptor of a pipe's end for reading.
    """
    Thread(target=_end_with, args=(given,), name="Lifeline", daemon=True).start()


def _end_with(given: int) -> None:
    while os.read(given, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_S)
    if os.getpgrp() == os.getpid():  # else the group has others in it
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _listen_on(descriptor: int) -> None:
    from vllm.entrypoints.launchers import launcher

    def listener(*args: Any, **options: Any) -> socket.socket:
        return socket.socket(fileno=descriptor)

    launcher.create_server_socket = listener
    launcher.create_server_unix_socket = listener


def main() -> None:
    """Runs `vllm` with the arguments behind the two descriptors."""
    given, descriptor, *arguments = sys.argv[1:]
    follow(int(given))
    sys.argv = ["vllm", *arguments]
    from vllm.entrypoints.cli.main import main as vllm

    if int(descriptor) >= 0:
        _listen_on(int(descriptor))
    vllm()


if __name__ == "__main__":
    main()
