# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks share a model, by layers or by heads, on one machine or on two hosts."""

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

#: Seconds until a client hears of a rank that is gone, whatever it waits for.
HEARD_S = 10.0
#: Tokens of an answer that is still on its way whenever something happens to a rank.
ENDLESS = 30_000
OPTIONS = (
    *("--served-model-name", "toy"),
    *("--max-model-len", str(ENDLESS + 100)),
    *("--kv-cache-memory-bytes", str(64 << 20)),
)
#: Parametrizes a test by how two ranks share a model.
by_layers_and_by_heads = pytest.mark.parametrize(
    "shape",
    [("--pipeline-parallel-size", "2"), ("--tensor-parallel-size", "2")],
    ids=["layers", "heads"],
)


def endless(tiny: str, folder: Path) -> str:
    """`tiny` for long texts; returns the folder."""
    folder.mkdir()
    return first_two_layers(tiny, folder, max_position_embeddings=2 * ENDLESS)


def workers(server: Server) -> dict[int, psutil.Process]:
    """Processes of the ranks of this machine, by what their lines in the log begin with."""
    found = re.findall(r"\(Worker_[PT]P(\d) pid=(\d+)\)", server.log.read_text())
    return {int(rank): psutil.Process(int(pid)) for rank, pid in found}


def completion(url: str, prompt: Sequence[int], max_tokens: int, **more: Any) -> bytes:
    """What the server answers to a greedy request.

    Raises:
        OSError: nothing, or not all of it.
    """
    body = {"model": "toy", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, **more}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as reply:
        return bytes(reply.read())


def tokens(url: str, prompt: Sequence[int], max_tokens: int = 16) -> list[int]:
    """A greedy answer's tokens."""
    return list(json.loads(completion(url, prompt, max_tokens))["choices"][0]["token_ids"])


class Client:
    """A client that waits for an endless answer, in a thread of its own."""

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
        """When it heard of an error, which it must within the timeout."""
        self._thread.join(timeout_s)
        assert self._ended is not None, "a client still waits"
        assert self._error is not None, "an answer came to its end"
        return self._ended


def clients(server: Server) -> list[Client]:
    """Three that stream and one that waits for all of its answer, all of whom are being served."""
    found = [Client(server.url, number, stream=number > 0) for number in range(4)]
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") < len(found):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def all_hear(waiting: Sequence[Client], since: float) -> None:
    """Every client hears of an error within HEARD_S of a moment of time.monotonic()."""
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
    """Runs an engine with a rank on each of two hosts, which may not answer yet.

    Args:
        models: of each host, the model's folder.
        hosts: both.
        shape: options that say how the ranks share the model.
        folder: for what they print, in `log0` and `log1`.
        environments: of each host, variables besides.

    Returns:
        The server, which the first host is, and the processes of both.
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
    """Until the server of several hosts answers; no process may end meanwhile."""
    deadline = time.monotonic() + 600
    while True:
        try:
            assert server.health() == 200
            return
        except OSError:
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.5)
