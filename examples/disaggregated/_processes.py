# SPDX-License-Identifier: Apache-2.0
"""Processes of this example: each on a free port, all ended with it."""

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
_START_S = 300.0  # many times what a first start takes, which compiles vLLM's own code
_STOP_S = 20.0
POLL_S = 0.25
_LAST_LINES = 20


class ProcessError(Exception):
    """A process did not start; the message has the end of what it printed."""


@dataclass(frozen=True)
class Process:
    """A server on this machine; `log` has all it prints."""

    name: str
    url: str
    log: Path
    handle: subprocess.Popen[bytes]

    def is_ready(self) -> bool:
        """Whether it answers.

        Raises:
            ProcessError: it has ended.
        """
        if self.handle.poll() is not None:
            raise ProcessError(f"the {self.name} ended with status {self.handle.poll()}{self._end}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:  # nobody listens yet, or the engine is not up
            return False

    @property
    def _end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join(["; it printed last:", *lines])

    def counter(self, name: str) -> float:
        """A counter of its /metrics, summed over labels; 0 where it is not there."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"vllm:{name}_total{{", f"vllm:{name}_total "))
        )


@contextmanager
def running(name: str, command: Sequence[str], port: int, folder: Path) -> Iterator[Process]:
    """Runs a server until the block ends, however it ends.

    Args:
        name: of it, for messages.
        command: with the port in it.
        port: where it will listen, on 127.0.0.1.
        folder: for its log.
    """
    log = folder / f"{name}.log"
    with log.open("w") as output:
        handle = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all it starts can be ended as one group
        )
        try:
            yield Process(name, f"http://127.0.0.1:{port}", log, handle)
        finally:
            _end(handle)


def _end(handle: subprocess.Popen[bytes]) -> None:
    """Asks a process to end; then ends whatever is left of its group."""
    handle.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            handle.wait(_STOP_S)
    finally:
        # On macOS a group of which only zombies are left may not be signaled.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(handle.pid, signal.SIGKILL)
        handle.wait()


def ready(processes: Sequence[Process]) -> Iterator[Process]:
    """The processes as they get ready.

    Raises:
        ProcessError: one ended, or did not answer in time.
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
    """Ports of 127.0.0.1 that nobody listens on, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
