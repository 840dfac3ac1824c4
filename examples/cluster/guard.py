# SPDX-License-Identifier: Apache-2.0
"""Runs a command that ends with the process that started it, however that one ends.

A server that outlived its replica would keep a Mac's memory. Ray kills an actor's children and its
process group, which would leave the server's own, so this process belongs to neither: it learns of
the actor's end from a pipe, its standard input, and tells of the server's by closing another, its
standard output.

    python guard.py COMMAND...
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

STOP_S = 30.0  # as launchd gives the server, for what is running


def main(command: list[str]) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # so that nothing but this process holds the pipe of standard output
        start_new_session=True,  # so that all it starts can be ended as one group
    )
    threading.Thread(target=_end_with_the_parent, args=(child,), daemon=True).start()
    child.wait()
    _kill(child)


def _end_with_the_parent(child: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_S)
    _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends what is left of its group."""
    # On macOS a group of which only zombies are left may not be signaled.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
