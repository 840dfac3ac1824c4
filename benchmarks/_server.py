# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of our own on a free loopback port, and what it counts."""

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

# The `vllm` command of this interpreter, whether or not its folder is on the PATH.
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
_STOP_TIMEOUT_S = 20.0


class ServerError(Exception):
    """The server did not do what was asked; the message says where its log is."""


def in_short(error: ServerError) -> str:
    """The last line of its message that speaks of an error; all of it where none does."""
    lines = [line for line in str(error).splitlines() if "rror" in line]
    return lines[-1].strip() if lines else str(error)


@dataclass(frozen=True)
class Server:
    """A server that answers; `log` has all it printed."""

    url: str
    model: str
    log: Path

    def post(self, path: str, body: dict[str, object] | None = None, timeout: float = 120) -> str:
        """Body of the reply to a POST of `body` as JSON."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.read().decode()

    def warm_up(self) -> None:
        """Has one short completion made, so that no measurement contains a first time."""
        self.post(
            "/v1/completions", {"model": self.model, "prompt": "Once upon a time", "max_tokens": 8}
        )

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        if not json.loads(self.post("/reset_prefix_cache"))["success"]:
            raise ServerError(f"the prefix cache could not be reset: requests run; see {self.log}")

    def prefix_counters(self) -> tuple[float, float]:
        """Prompt tokens looked up in the prefix cache so far, and those found."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as reply:
            text = reply.read().decode()
        return (
            counter(text, "vllm:prefix_cache_queries_total"),
            counter(text, "vllm:prefix_cache_hits_total"),
        )


def counter(metrics: str, name: str) -> float:
    """Sum over all labels of the counter `name` in Prometheus' text format; 0 where absent."""
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
    """Runs `vllm serve` until the block ends, however it ends.

    Args:
        options: more of its command line.
        log: file for what it prints.
        timeout: seconds it may take to answer.
        environment: of the server; None: this process's.

    Raises:
        ServerError: it exited, or did not answer in time.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *options]
    # Endpoints that change the server's state, such as the reset of its cache, are for this mode.
    environment = {**(os.environ if environment is None else environment)}
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that all it starts can be stopped as one group
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
        except OSError:  # no one listens yet, or the engine is not up
            time.sleep(0.5)
    raise ServerError(f"vllm serve did not answer within {timeout:.0f} s; see {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and all it started; returns once none of them runs."""
    for order in (signal.SIGTERM, signal.SIGKILL):
        # On macOS a group of which only zombies are left may not be signaled.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, order)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while time.monotonic() < deadline:
            # A signal is on its way for a while, also the one that cannot be refused.
            if process.poll() is not None and not _runs_in_group(process.pid):
                return
            time.sleep(0.02)


def _runs_in_group(group: int) -> bool:
    """Whether any process of the group still runs; zombies that wait to be collected do not."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False
