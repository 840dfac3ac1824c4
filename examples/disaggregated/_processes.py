# SPDX-License-Identifier: Apache-2.0
"""Runs the example's processes, each on a free port, and ends them with it."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_START_S = 300.0  # far longer than a first start, which compiles vLLM's code
_STOP_S = 20.0
POLL_S = 0.25
_LAST_LINES = 20


class ProcessError(Exception):
    """A process did not start; the message has the end of its log."""


@dataclass(frozen=True)
class Process:
    """A local server; `log` has its output."""

    name: str
    url: str
    log: Path
    handle: subprocess.Popen[bytes]

    def is_ready(self) -> bool:
        """Returns whether the server answers.

        Raises:
            ProcessError: the process has ended.
        """
        if self.handle.poll() is not None:
            raise ProcessError(f"the {self.name} ended with status {self.handle.poll()}{self._end}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:  # not listening yet, or the engine is not up
            return False

    @property
    def _end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join(["; it printed last:", *lines])

    def counter(self, name: str) -> float:
        """Sums a /metrics counter over its labels; 0 if it is absent."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"vllm:{name}_total{{", f"vllm:{name}_total "))
        )


@contextmanager
def running(name: str, command: Sequence[str], port: int, folder: Path) -> Iterator[Process]:
    """Runs a server until the block ends.

    Args:
        name: name for messages.
        command: the command, including the port.
        port: its port on 127.0.0.1.
        folder: folder for its log.
    """
    log = folder / f"{name}.log"
    with log.open("w") as output:
        handle = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that the whole group can be stopped
        )
        try:
            yield Process(name, f"http://127.0.0.1:{port}", log, handle)
        finally:
            _end(handle)


def _end(handle: subprocess.Popen[bytes]) -> None:
    """Terminates a process, then kills the rest of its group."""
    handle.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            handle.wait(_STOP_S)
    finally:
        # On macOS, signaling a group with only zombies fails.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(handle.pid, signal.SIGKILL)
        handle.wait()


def ready(processes: Sequence[Process]) -> Iterator[Process]:
    """Yields processes as they get ready.

    Raises:
        ProcessError: a process ended, or did not answer in time.
    """
    waiting, deadline = list(processes), time.monotonic() + _START_S
    while waiting:
        for process in [process for process in waiting if process.is_ready()]:
            waiting.remove(process)
            yield process
        if waiting and time.monotonic() > deadline:
            names = ", ".join(process.name for process in waiting)
            raise ProcessError(f"no answer after {_START_S:.0f} s: {names}{waiting[0]._end}")
        time.sleep(POLL_S)


def free_ports(count: int) -> list[int]:
    """Returns distinct free ports of 127.0.0.1."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
