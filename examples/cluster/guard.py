# SPDX-License-Identifier: Apache-2.0
"""Runs a command that ends with its parent process, however that ends.

A server that outlived its replica would keep a Mac's memory. Ray kills an actor's children and its
process group, but not the server's own group, so this process is in neither: its standard input, a
pipe, closes when the actor ends, and it closes its standard output when the server ends.
standard output.

    python guard.py COMMAND...
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

STOP_S = 30.0  # as launchd grants for running requests


def main(command: list[str]) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,  # so that only this process holds the standard output pipe
        start_new_session=True,  # so that the whole group can be stopped
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
    """Kills the rest of the process group."""
    # On macOS, signaling a group with only zombies fails.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
