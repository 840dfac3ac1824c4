# SPDX-License-Identifier: Apache-2.0
"""Measures link bytes and waiting time of a model on two hosts, pipeline or tensor parallel.

Hosts are network namespaces. Bytes are counted on the second host's cable, which no client uses.
Each host has one processor, so an engine on one of them computes no faster than a rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _server import VLLM, ServerError, stop
from _shared import note, on_core
from _toy_model import VOCABULARY, Toy

PORT, MASTER = 8000, 29501
_START_S = 900.0  # each rank imports vLLM, which takes minutes on a busy machine
_IDLE_S = 4.0
SHORT, LONG = 128, 896  # prompt tokens, each prompt one step
FEW, MANY = 20, 120  # output tokens
RATE = "1gbit"
TOY = Toy(hidden=1024, layers=4, heads=8, kv_heads=4)
_FLOAT = 4  # bytes of a hidden state's element; the CPU device serves float32
#: Pipeline parallel: bytes per token, whose hidden states go to the second rank.
LAYERS_BYTES = TOY.hidden * _FLOAT
#: Tensor parallel: two all-reduces per layer, each sending an element 2 (n - 1) / n times around a
#: ring of n ranks (Patarasuk and Yuan 2009), so once for two.
HEADS_BYTES = 2 * TOY.layers * TOY.hidden * _FLOAT


class Ranks:
    """An engine on one or several hosts, queried through the first."""

    def __init__(self, hosts: Sequence[Any], model: str) -> None:
        self.hosts = hosts
        self._url = f"http://{hosts[0].address}:{PORT}"
        self._model = model
        self._rng = np.random.default_rng(0)

    def ask(self, tokens: int, max_tokens: int) -> float:
        """Returns the seconds of a request with a new prompt."""
        prompt = self._rng.integers(2, VOCABULARY, tokens).tolist()
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens}
        data = json.dumps(body | {"temperature": 0, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self._url}/v1/completions", data, headers)
        started = time.perf_counter()
        with urllib.request.urlopen(asked, timeout=600) as reply:
            reply.read()
        return time.perf_counter() - started

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as reply:
                return reply.status == 200
        except OSError:
            return False

    def bytes_of(self, tokens: int, max_tokens: int, idle: tuple[float, float]) -> np.ndarray:
        """Returns the second host's traffic in bytes for a request, less idle traffic."""
        before = self._bytes()
        seconds = self.ask(tokens, max_tokens)
        return self._bytes() - before - np.array(idle) * seconds

    def idle_rate(self) -> tuple[float, float]:
        """Returns the second host's idle traffic in bytes per second, received and sent."""
        before = self._bytes()
        time.sleep(_IDLE_S)
        got, sent = (self._bytes() - before) / _IDLE_S
        return float(got), float(sent)

    def _bytes(self) -> np.ndarray:
        second = self.hosts[1]
        return np.array([second.received_bytes, second.sent_bytes], float)

    def seconds_a_token(self, streams: int) -> float:
        """Returns seconds per token of staggered streams, each of which forms its own batch."""
        with ThreadPoolExecutor(streams) as threads:
            started = time.perf_counter()
            asked = []
            for _ in range(streams):
                asked.append(threads.submit(self.ask, 16, MANY))
                time.sleep(0.05)
            for each in asked:
                each.result()
            return (time.perf_counter() - started) / (streams * MANY)


@contextmanager
def ranks(
    hosts: Sequence[Any], model: str, options: Sequence[str], folder: Path
) -> Iterator[Ranks]:
    """Runs one engine with a rank per host until the block ends.

    Raises:
        ServerError: the engine did not start; the message has its output.
    """
    common = [*VLLM, "serve", model, "--max-model-len", str(TOY.longest)]
    common += ["--max-num-batched-tokens", "1024", "--kv-cache-memory-bytes", str(64 << 20)]
    common += ["--no-enable-prefix-caching", *options]
    if len(hosts) > 1:
        common += ["--nnodes", str(len(hosts)), "--master-addr", hosts[0].address]
        common += ["--master-port", str(MASTER)]
    with ExitStack() as stack:
        for number, host in enumerate(hosts):
            more = ["--node-rank", str(number)] if len(hosts) > 1 else []
            more += ["--headless"] if number else ["--host", "0.0.0.0", "--port", str(PORT)]
            log = folder / f"rank-{len(hosts)}-{number}.log"
            output = stack.enter_context(log.open("w"))
            environment = os.environ | {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"}
            with on_core(number):
                process = host.popen(
                    *common,
                    *more,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            stack.callback(stop, process)
            if number == 0:
                first, first_log = process, log
        found = Ranks(hosts, model)
        deadline = time.monotonic() + _START_S
        while not found.is_healthy():
            if first.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{first_log.read_text(errors='replace')}\nno answer")
            time.sleep(0.5)
        yield found


@dataclass(frozen=True)
class Crossing:
    """Bytes across the link, measured and estimated."""

    got_a_row: float  # received by the second host
    sent_a_row: float
    estimated: float  # estimated lower bound of the larger of the two
    got_a_step: float  # besides tokens: scheduler output, and the reply
    sent_a_step: float
    idle: float  # bytes per second, both directions


def crossing(engine: Ranks, estimated: float) -> Crossing:
    """Measures bytes of prompts and answers of two lengths; differences remove constant parts."""
    engine.ask(LONG, 4)
    engine.ask(SHORT, 4)
    idle = engine.idle_rate()

    def median(tokens: int, max_tokens: int) -> np.ndarray:
        return np.median([engine.bytes_of(tokens, max_tokens, idle) for _ in range(3)], axis=0)

    row = (median(LONG, 1) - median(SHORT, 1)) / (LONG - SHORT)
    step = (median(16, MANY) - median(16, FEW)) / (MANY - FEW) - row
    return Crossing(*map(float, (row[0], row[1])), estimated, *map(float, step), sum(idle))


@dataclass(frozen=True)
class Waiting:
    """Waiting time of two ranks for a number of streams."""

    streams: int
    alone: float  # seconds per token of one engine with one batch's share of the streams
    seconds: float  # seconds per token of the ranks
    beside: float  # extra time per step of both ranks, over a step of one engine

    @property
    def batches(self) -> int:
        """Batches in flight; vLLM has at most one per rank."""
        return min(self.streams, 2)

    @property
    def measured(self) -> float:
        """Share of the ranks' time that is not one engine's work."""
        return 1 - self.alone / (2 * self.seconds)

    @property
    def estimated(self) -> float:
        """Expected share if a step takes as long as one engine's, in two equal parts."""
        return max(0.0, 1 - self.batches / 2)

    @property
    def estimated_with_more(self) -> float:
        """Like `estimated`, plus the extra time per step, taken from one stream."""
        return 1 - self.batches * self.alone / (2 * (self.alone + self.beside))


def by_layers(hosts: Sequence[Any], folder: Path) -> dict[str, object]:
    """Compares two pipeline parallel ranks with one engine on one host.

    Raises:
        ServerError: an engine did not start.
    """
    model = TOY.write(folder / "layers")
    note("one engine on one host")
    with ranks(hosts[:1], model, [], folder) as engine:
        alone = _seconds_a_token(engine, (1, 2))
    note("two pipeline parallel ranks")
    with ranks(hosts, model, ["--pipeline-parallel-size", "2"], folder) as engine:
        found = crossing(engine, LAYERS_BYTES)
        times = _seconds_a_token(engine, (1, 2, 4))
    waits = [
        Waiting(n, alone[max(1, n // 2)], seconds, times[1] - alone[1])
        for n, seconds in times.items()
    ]
    return {
        "bytes": found.__dict__,
        "waiting": [
            {
                "streams": each.streams,
                "ms a token, one engine, as many streams as a batch has": 1e3 * each.alone,
                "ms a token": 1e3 * each.seconds,
                "ranks wait": each.measured,
                "estimated": each.estimated,
                "with what a step takes besides": each.estimated_with_more,
            }
            for each in waits
        ],
    }


def _seconds_a_token(engine: Ranks, streams: Sequence[int]) -> dict[int, float]:
    """Returns the best of three times per number of streams."""
    engine.ask(16, 4)
    return {n: min(engine.seconds_a_token(n) for _ in range(3)) for n in streams}


def by_heads(hosts: Sequence[Any], folder: Path) -> dict[str, object]:
    """Measures two tensor parallel ranks.

    Raises:
        ServerError: an engine did not start.
    """
    model = TOY.write(folder / "heads")
    note("two tensor parallel ranks")
    with ranks(hosts, model, ["--tensor-parallel-size", "2"], folder) as engine:
        found = crossing(engine, HEADS_BYTES)
        seconds = _seconds_a_token(engine, (1,))[1]
    return {"bytes": found.__dict__, "ms a token": 1e3 * seconds}
