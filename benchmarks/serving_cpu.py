# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU time per request of tenants, time limits and the response cache.

Alternates requests through the class and around it on one server: new requests with one token, one
at a time. User and system time are those of the server's process, without the engine. A second
round samples the stack, which has a cost of its own, for the table of where the time goes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from _server import Server, serve
from _serving_probe import PAST, START, STOP
from _shared import note, table
from serving import settings

from vllm_metal.settings import salts, secret_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # defines the default model

import _common  # noqa: E402

GOAL_MS = 2.0
#: Kinds of requests: whole or streamed, and whether the answer may be cached.
KINDS = {
    "whole, kept": {"temperature": 0},
    "whole, not kept": {"temperature": 1},
    "stream, kept": {"temperature": 0, "stream": True},
}
_WORDS = ("river", "town", "hill", "sea", "lake")


@dataclass(frozen=True)
class Cost:
    """CPU milliseconds per request."""

    kind: str
    requests: int  # per variant
    past: float
    through: float

    @property
    def added(self) -> float:
        return self.through - self.past


class Client:
    """A persistent connection, and the server's process."""

    def __init__(self, server: Server, key: str, salt: str) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=300)
        self._key, self._salt, self._rng = key, salt, random.Random(1)
        self._process = _listener(parts.port)

    def ask(self, fields: dict[str, object], past: bool) -> None:
        """Sends a new request.

        Raises:
            RuntimeError: the server rejected the request.
        """
        text = f"{' '.join(self._rng.choices(_WORDS, k=20))} {self._rng.random()}"
        messages = [{"role": "user", "content": text}]
        asked = {"model": "m", "messages": messages, "max_tokens": 1, **fields}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        if past:
            asked["cache_salt"] = self._salt
            headers[PAST.decode()] = "1"
        self._send("POST", "/v1/chat/completions", json.dumps(asked), headers)

    def block(self, fields: dict[str, object], past: bool, size: int) -> float:
        """Returns CPU milliseconds per request."""
        before = self._process.cpu_times()
        for _ in range(size):
            self.ask(fields, past)
        after = self._process.cpu_times()
        return (after.user + after.system - before.user - before.system) / size * 1000

    def sampled(self, fields: dict[str, object], past: bool, size: int) -> Counter[str]:
        """Returns samples by label for `size` requests."""
        self._send("GET", START)
        for _ in range(size):
            self.ask(fields, past)
        return Counter(json.loads(self._send("GET", STOP)))

    def _send(self, method: str, path: str, body: str = "", headers: object = None) -> bytes:
        self._connection.request(method, path, body, headers or {})  # type: ignore[arg-type]
        reply = self._connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {content[:300]!r}")
        return content


def _listener(port: int | None) -> psutil.Process:
    """Returns the process that listens on a local port."""
    for found in psutil.Process().children(recursive=True):
        if any(c.status == "LISTEN" and c.laddr.port == port for c in found.net_connections()):
            return found
    raise RuntimeError(f"nobody listens on port {port}")


def measure(client: Client, kind: str, blocks: int, size: int) -> Cost:
    """Alternates blocks of requests around the class and through it."""
    ways: dict[bool, list[float]] = {True: [], False: []}
    for number in range(blocks):
        for past in (True, False) if number % 2 else (False, True):
            ways[past].append(client.block(KINDS[kind], past, size))
    # The kernel counts hundredths of a second, too coarse for a median of blocks.
    past, through = (statistics.fmean(ways[way]) for way in (True, False))
    return Cost(kind, blocks * size, past, through)


def places(client: Client, kind: str, cost: Cost, blocks: int, size: int) -> list[list[object]]:
    """Returns table rows: milliseconds by label, around the class and through it."""
    found = {True: Counter[str](), False: Counter[str]()}
    for _ in range(blocks):
        for past in found:
            found[past] += client.sampled(KINDS[kind], past, size)
    # Samples give the shares; the total was measured without sampling.
    ms = {True: cost.past / found[True].total(), False: cost.through / found[False].total()}
    names = sorted(found[False] | found[True], key=lambda name: -found[False][name])
    rows: list[list[object]] = []
    for name in names:
        past, through = (found[way][name] * ms[way] for way in (True, False))
        rows.append([name, past, through, through - past])
    return rows


@contextmanager
def client_of(model: str, logs: Path, timeout: float) -> Iterator[Client]:
    """Runs a warmed-up server with a bypass for the class."""
    options = ["--served-model-name", "m", "--max-model-len", "1024"]
    options += ["--kv-cache-memory-bytes", str(256 << 20)]
    options += ["--middleware", "_serving_probe.Probe"]
    # A block of requests may exceed the default idle limit, 5 s.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
    found = [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, found))
    with (
        tempfile.TemporaryDirectory() as folder,
        settings(Path(folder)) as key,
        serve(model, options, logs / "serving-cpu.log", timeout) as server,
    ):
        secret = secret_file.read(Path(folder) / "secret", "secret")
        client = Client(server, key, salts.derive(secret, "benchmark"))
        for _ in range(100):
            for past in (True, False):
                client.ask(KINDS["whole, kept"], past)
        yield client


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--blocks", type=int, default=20, help="blocks of requests per variant")
    parser.add_argument("--size", type=int, default=50, help="requests per block")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    logs = args.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    load = os.getloadavg()[0]
    note("starting a server")
    with client_of(args.model or _common.default_model(), logs, args.start_timeout) as client:
        note("CPU time, in turns")
        costs = [measure(client, kind, args.blocks, args.size) for kind in KINDS]
        note("where it goes")
        rows = places(client, costs[0].kind, costs[0], max(1, args.blocks // 2), args.size)
    table(
        ["CPU of a request, ms (mean)", "past", "through", "added", "goal"],
        [[each.kind, each.past, each.through, each.added, f"≤ {GOAL_MS:g}"] for each in costs],
    )
    table([f"Where it goes ({costs[0].kind}), ms", "past", "through", "added"], rows)
    found = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "model": Path(args.model or _common.default_model()).name,
        "load": [load, os.getloadavg()[0]],
        "costs": [asdict(each) | {"added": each.added} for each in costs],
        "places": rows,
    }
    (args.out / "serving_cpu.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
