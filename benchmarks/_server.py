# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` on a free loopback port, and reads its counters."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# This interpreter's `vllm` command, even if it is not on the PATH.
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_STOP_TIMEOUT_S = 20.0


class ServerError(Exception):
    """The server failed; the message names its log."""


def in_short(error: ServerError) -> str:
    """Returns the last line of the message that mentions an error, else the whole message."""
    lines = [line for line in str(error).splitlines() if "rror" in line]
    return lines[-1].strip() if lines else str(error)


@dataclass(frozen=True)
class Server:
    """A running server; `log` has its output."""

    url: str
    model: str
    log: Path

    def post(self, path: str, body: dict[str, object] | None = None, timeout: float = 120) -> str:
        """Posts `body` as JSON; returns the response body."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.read().decode()

    def warm_up(self) -> None:
        """Requests one short completion, so that measurements include no first-time work."""
        self.post(
            "/v1/completions", {"model": self.model, "prompt": "Once upon a time", "max_tokens": 8}
        )

    def forget_prefixes(self) -> None:
        """Clears the prefix cache."""
        if not json.loads(self.post("/reset_prefix_cache"))["success"]:
            raise ServerError(f"the prefix cache could not be reset: requests run; see {self.log}")

    def prefix_counters(self) -> tuple[float, float]:
        """Returns the prompt tokens looked up in the prefix cache so far, and those found."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as reply:
            text = reply.read().decode()
        return (
            counter(text, "vllm:prefix_cache_queries_total"),
            counter(text, "vllm:prefix_cache_hits_total"),
        )


def counter(metrics: str, name: str) -> float:
    """Sums the counter `name` over all labels in Prometheus' text format; 0 where absent."""
    pattern = rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)"
    return sum(float(value) for value in re.findall(pattern, metrics, re.MULTILINE))


@contextmanager
def serve(
    model: str,
    options: Sequence[str],
    log: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Runs `vllm serve` until the block ends.

    Args:
        options: more command-line options.
        log: file for its output.
        timeout: maximum seconds until it answers.
        environment: the server's environment; None: this process's.

    Raises:
        ServerError: the server exited, or did not answer in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
    # Enables endpoints that change the server's state, such as the cache reset.
    environment = {**(os.environ if environment is None else environment)}
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that the whole group can be stopped
        )
        try:
            _wait_until_healthy(process, url, log, timeout)
            yield Server(url, model, log)
        finally:
            stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ServerError(f"vllm serve exited with {process.returncode}; {log} ends:\n{tail}")
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except OSError:  # not listening yet, or the engine is not up
            time.sleep(0.5)
    raise ServerError(f"vllm serve did not answer within {timeout:.0f} s; see {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stops the server and its process group; returns once all have ended."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        # On macOS, signaling a group with only zombies fails.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, order)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            # Even SIGKILL takes a moment to arrive.
            if process.poll() is not None and not _runs_in_group(process.pid):
                return
            time.sleep(0.02)


def _runs_in_group(group: int) -> bool:
    """Returns whether any process of the group, other than zombies, still runs."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False
