# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` as a user does, in its own processes, on a free loopback port."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
from network.hosts import Host
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

# The interpreter's `vllm` command, even if it is not on the PATH.
VLLM = ("-m", "vllm.entrypoints.cli.main")
#: Variables of in-process engine tests, and a ban on bytecode that some environments have:
#: with bytecode, vLLM's imports take 9 s instead of 20 s (on two cores) after the first time.
_NOT_FOR_THE_SERVER = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_LOGGING_LEVEL",
    "PYTHONDONTWRITEBYTECODE",
)
_START_TIMEOUT_S = 240.0  # ten times what an idle two-core machine needs
_STOP_TIMEOUT_S = 20.0
#: Log lines that tests read, of all processes; for users' default, see test_first_lines.py.
_LOGGED = {"VLLM_LOGGING_LEVEL": "INFO"}
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
#: A forked engine saves an import of vLLM, 8 of a server's 20 CPU seconds. On macOS Apple's
#: frameworks kill such a child.
FORKED: Mapping[str, str] = MappingProxyType({} if sys.platform == "darwin" else {_METHOD: "fork"})
#: vLLM's default, for tests of startup and shutdown, and for several workers per engine.
SPAWNED: Mapping[str, str] = MappingProxyType({_METHOD: ""})


@dataclass(frozen=True)
class Server:
    """A running server; `log` has its output, `process` is its main process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    metrics_key: str = ""  # key for /metrics

    def client(self) -> OpenAI:
        """Returns a client that reports every failure without retries."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def health(self) -> int:
        """HTTP status of /health."""
        with urllib.request.urlopen(f"{self.url}/health", timeout=30) as reply:
            return int(reply.status)

    def metric(self, name: str, **labels: str) -> float:
        """Sums the samples of `name` in /metrics that carry `labels`.

        Raises:
            KeyError: there are none, so that a misspelled name does not pass as zero.
        """
        headers = {"Authorization": f"Bearer {self.metrics_key}"}  # without tenants, any key works
        asked = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        values = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not values:
            raise KeyError(name)
        return sum(values)


@contextmanager
def serve(
    model: str,
    options: Sequence[str],
    log: Path,
    port: int | None = None,
    environment: Mapping[str, str] = _NO_VARIABLES,
    python: str = sys.executable,
    start_timeout_s: float = _START_TIMEOUT_S,
    host: Host | None = None,
) -> Iterator[Server]:
    """Runs `vllm serve` until the block ends.

    Args:
        model: the model argument.
        options: more command-line options.
        log: file for its output.
        port: port to listen on; None: any free one.
        environment: additional variables, over those above; an empty one is
            removed.
        python: the interpreter.
        start_timeout_s: maximum seconds until it answers.
        host: its host; None: this machine.

    Raises:
        AssertionError: it exited, or did not answer in time; the message has the end of the log.
    """
    port = port or free_port()
    given = [*options, "--port", str(port)]
    with started(model, given, environment, log, python, host) as process:
        address = "127.0.0.1" if host is None else host.address
        server = Server(f"http://{address}:{port}", log, process)
        answering(server, start_timeout_s)
        yield server


def engine_core(server: Server) -> psutil.Process:
    """Returns the engine's process, by its log prefix."""
    found = re.search(r"^\(EngineCore\w* pid=(\d+)\)", server.log.read_text(), re.MULTILINE)
    assert found is not None
    return psutil.Process(int(found[1]))


def refused_start(
    model: str, options: Sequence[str], environment: Mapping[str, str], log: Path
) -> int:
    """Runs a `vllm serve` that must fail to start; returns its exit status.

    Args:
        model: the model argument.
        options: more command-line options.
        environment: additional variables.
        log: file for its output.

    Raises:
        subprocess.TimeoutExpired: it did not exit.
    """
    with started(model, [*options, "--port", str(free_port())], environment, log) as process:
        return process.wait(_START_TIMEOUT_S)


@contextmanager
def started(
    model: str,
    options: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    python: str = sys.executable,
    host: Host | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a `vllm serve` without waiting for it to answer; see `serve` and `refused_start`."""
    kept = {key: value for key, value in os.environ.items() if key not in _NOT_FOR_THE_SERVER}
    variables = kept | _LOGGED | FORKED | environment
    address = "127.0.0.1" if host is None else host.address
    command = [python, *VLLM, "serve", model, "--host", address, *options]
    with log.open("w") as output:
        process = subprocess.Popen(
            command if host is None else host.command(*command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={key: value for key, value in variables.items() if value},
            start_new_session=True,  # so that the whole group can be killed
        )
        try:
            yield process
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminates the server, then kills the rest of its group."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
    finally:
        # On macOS, signaling a group with only zombies fails.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """Returns a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answering(server: Server, timeout_s: float) -> None:
    """Waits until a started server answers.

    Raises:
        AssertionError: see `serve`.
    """
    process, deadline = server.process, time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if server.health() == 200:
                return
        except OSError:  # not listening yet, or the engine is not up
            time.sleep(0.25)
    state = "is not up yet" if process.poll() is None else f"exited with {process.returncode}"
    tail = "\n".join(server.log.read_text(errors="replace").splitlines()[-20:])
    raise AssertionError(f"vllm serve {state}; its log ends:\n{tail}")
