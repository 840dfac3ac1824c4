# SPDX-License-Identifier: Apache-2.0
"""Engines with several ranks, pipeline or tensor parallel, on one machine or two hosts."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e.models import first_two_layers
from e2e.server import VLLM, Server
from network.hosts import Host

#: Seconds until a waiting client must get an error after a rank is gone.
HEARD_S = 10.0
#: Answer length that takes longer than any event in a test.
ENDLESS = 30_000
OPTIONS = (
    *("--served-model-name", "toy"),
    *("--max-model-len", str(ENDLESS + 100)),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)
#: Parametrizes a test by the kind of parallelism of two ranks.
by_layers_and_by_heads = pytest.mark.parametrize(
    "shape",
    [("--pipeline-parallel-size", "2"), ("--tensor-parallel-size", "2")],
    ids=["layers", "heads"],
)


def endless(tiny: str, folder: Path) -> str:
    """Writes `tiny` for long texts; returns the folder."""
    folder.mkdir()
    return first_two_layers(tiny, folder, max_position_embeddings=2 * ENDLESS)


def workers(server: Server) -> dict[int, psutil.Process]:
    """Returns this machine's rank processes by their log prefixes."""
    found = re.findall(r"\(Worker_[PT]P(\d) pid=(\d+)\)", server.log.read_text())
    return {int(rank): psutil.Process(int(pid)) for rank, pid in found}


def completion(url: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> bytes:
    """Returns the server's answer to a greedy request.

    Raises:
        OSError: there is no answer, or an incomplete one.
    """
    body = {"model": "toy", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **more}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as reply:
        return bytes(reply.read())


def tokens(url: str, prompt: Sequence[int], max_tokens: int = 16) -> list[int]:
    """Returns a greedy answer's tokens."""
    return list(json.loads(completion(url, prompt, max_tokens))["choices"][0]["token_ids"])


class Client:
    """A client thread that waits for an endless answer."""

    def __init__(self, url: str, number: int, stream: bool) -> None:
        self._asked = url, [3 + number, 5, 7], ENDLESS
        self._stream = stream
        self._error: str | None = None
        self._ended: float | None = None  # time.monotonic()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            answer = completion(*self._asked, stream=self._stream)
            if self._stream and (b'"error"' in answer or b"[DONE]" not in answer):
                self._error = "the stream ended before its end"
        except (OSError, http.client.HTTPException) as error:
            self._error = str(error) or repr(error)
        self._ended = time.monotonic()

    def heard(self, timeout_s: float) -> float:
        """Returns when the client got an error, which must be within the timeout."""
        self._thread.join(timeout_s)
        assert self._ended is not None, "a client still waits"
        assert self._error is not None, "an answer came to its end"
        return self._ended


def clients(server: Server) -> list[Client]:
    """Returns three streaming clients and one that waits for a whole answer, all being served."""
    found = [Client(server.url, number, stream=number > 0) for number in range(4)]
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") < len(found):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def all_hear(waiting: Sequence[Client], since: float) -> None:
    """Asserts that all clients get an error within HEARD_S of a time.monotonic() value."""
    late = [each.heard(6 * HEARD_S) - since for each in waiting]
    print("seconds until clients heard:", *(f"{each:.1f}" for each in late))
    assert max(late) < HEARD_S


@contextmanager
def on_two_hosts(
    models: Sequence[str],
    hosts: Sequence[Host],
    shape: Sequence[str],
    folder: Path,
    environments: Sequence[Mapping[str, str]] = ({}, {}),
) -> Iterator[tuple[Server, Sequence[subprocess.Popen[bytes]]]]:
    """Runs an engine with a rank on each of two hosts; it may not answer yet.

    Args:
        models: the model's folder on each host.
        hosts: the two hosts.
        shape: options for the parallelism.
        folder: folder for their output, in `log0` and `log1`.
        environments: additional variables per host.

    Returns:
        The server, on the first host, and both processes.
    """
    first = hosts[0].address
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for node, host in enumerate(hosts):
            command = (
                *(sys.executable, *VLLM, "serve", models[node], *OPTIONS, *shape),
                *("--nnodes", "2", "--node-rank", str(node)),
                *("--master-addr", first, "--master-port", "29517"),
                *(("--headless",) if node else ("--host", "0.0.0.0", "--port", "8000")),
            )
            environment = os.environ | {
                "VLLM_HOST_IP": host.address,
                "GLOO_SOCKET_IFNAME": "eth0",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            }
            with (folder / f"log{node}").open("w") as output:
                processes.append(
                    host.popen(
                        *command,
                        env=environment | environments[node],
                        cwd=folder,  # python -m finds packages here before those of PYTHONPATH
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield Server(f"http://{first}:8000", folder / "log0", processes[0]), processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def wait_until_healthy(server: Server, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits until the server answers; fails if a process ends first."""
    deadline = time.monotonic() + 600
    while True:
        try:
            assert server.health() == 200
            return
        except OSError:
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.5)
