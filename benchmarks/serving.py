# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of tenants and the response cache per request, and the gain of cache hits.

Two servers of one model run at once and get requests in turn; one has the middleware
`vllm_metal.serving.Tenants`. Prints tables, and writes results as JSON and a plot.
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
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from _server import Server, serve
from _shared import note, table

from vllm_metal.serving import tenants_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))  # defines the default model

import _common  # noqa: E402

#: Share of repeated requests in the published benchmark that this follows.
RECIPES_REPEATS = 0.38
#: Goals for the cache's gain and cost; printed beside the results only.
GOAL_ADDED_MS, GOAL_FASTER = 2.0, 50.0
_SETTINGS = """
timeout_s = 600
[tenants]
keys = "tenants.json"
secret = "secret"
[response_cache]
path = "answers"
"""


class Client:
    """A persistent connection to a server, like a proxy's."""

    def __init__(self, server: Server, key: str | None) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=300)
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, text: str, max_tokens: int) -> tuple[float, str | None]:
        """Returns an answer's milliseconds and its cache status.

        Raises:
            RuntimeError: the server rejected the request.
        """
        fields = {
            "model": "m",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        body = json.dumps(fields)
        started = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", body, self._headers)
        reply = self._connection.getresponse()
        content = reply.read()
        took = (time.perf_counter() - started) * 1000
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {content[:300]!r}")
        return took, reply.headers.get("X-Cache")


@dataclass(frozen=True)
class Added:
    """Median milliseconds of non-repeated requests."""

    requests: int
    without: float
    with_it: float
    added: float  # median difference of pairs, balanced over both orders


@dataclass(frozen=True)
class Hits:
    """Median milliseconds of a computed and a cached answer."""

    tokens: int
    computed: float
    kept: float

    @property
    def faster(self) -> float:
        return self.computed / self.kept


@dataclass(frozen=True)
class Repeats:
    """A stream of requests with repeats."""

    share: float  # share of repeated requests
    tokens: int
    without: list[float]  # milliseconds of each request
    with_it: list[float]

    @property
    def gain(self) -> float:
        return sum(self.without) / sum(self.with_it)


def words(rng: random.Random, count: int) -> str:
    """Returns a text that is unique to this request."""
    return " ".join(rng.choice(("river", "town", "hill", "sea", "lake")) for _ in range(count)) + (
        f" {rng.random()}"
    )


def measure_added(plain: Client, gated: Client, requests: int) -> Added:
    """Sends the same new request to both in turn, with one output token to isolate the overhead."""
    rng, without, with_it = random.Random(1), [], []
    for number in range(requests):
        text = words(rng, 40)
        order = ((plain, without), (gated, with_it))
        for client, found in order if number % 2 else order[::-1]:
            found.append(client.ask(text, 1)[0])
    added = [b - a for a, b in zip(without, with_it, strict=True)]
    # The first of a pair sees another machine state, a larger effect than the one measured: the
    # differences form two clusters, so take the median of each.
    orders = [statistics.median(added[first::2]) for first in (0, 1)]
    medians = (statistics.median(each) for each in (without, with_it))
    return Added(requests, *medians, statistics.fmean(orders))


def measure_hits(gated: Client, answers: int, tokens: int) -> Hits:
    """Sends each request twice: once computed, once cached."""
    rng, computed, kept = random.Random(2), [], []
    for _ in range(answers):
        text = words(rng, 40)
        took, mark = gated.ask(text, tokens)
        again, hit = gated.ask(text, tokens)
        assert (mark, hit) == ("MISS", "HIT")
        computed.append(took)
        kept.append(again)
    return Hits(tokens, statistics.median(computed), statistics.median(kept))


def measure_repeats(plain: Client, gated: Client, requests: int, tokens: int) -> Repeats:
    """Sends the same requests to both in turn, with the published share of repeats."""
    rng = random.Random(3)
    num_repeats = round(RECIPES_REPEATS * requests)
    repeats = [True] * num_repeats + [False] * (requests - num_repeats - 1)
    rng.shuffle(repeats)
    asked = [words(rng, 40)]
    texts = [*asked]
    for repeat in repeats:
        texts.append(rng.choice(asked) if repeat else words(rng, 40))
        if not repeat:
            asked.append(texts[-1])
    pairs = [(plain.ask(text, tokens)[0], gated.ask(text, tokens)[0]) for text in texts]
    without, with_it = (list(each) for each in zip(*pairs, strict=True))
    return Repeats(num_repeats / requests, tokens, without, with_it)


@contextmanager
def servers(model: str, logs: Path, timeout: float) -> Iterator[tuple[Client, Client]]:
    """Runs a server with and one without the middleware; yields a client for each."""
    options = ["--served-model-name", "m", "--max-model-len", "1024"]
    options += ["--kv-cache-memory-bytes", str(256 << 20)]
    # The default, 5 s, may pass during the other server's turn.
    os.environ.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
    gate = [*options, "--middleware", "vllm_metal.serving.Tenants"]
    with (
        tempfile.TemporaryDirectory() as folder,
        serve(model, options, logs / "serving-without.log", timeout) as plain,
        settings(Path(folder)) as key,
        serve(model, gate, logs / "serving-with.log", timeout) as gated,
    ):
        clients = Client(plain, None), Client(gated, key)
        rng = random.Random(0)
        while clients[1].ask(words(rng, 40), 1)[1] == "BYPASS":  # it still hashes the weights
            time.sleep(0.5)
        for _ in range(20):
            for client in clients:
                client.ask(words(rng, 40), 8)
        yield clients


@contextmanager
def settings(folder: Path) -> Iterator[str]:
    """Writes settings, passes them to servers started in the block, and yields a tenant's key."""
    (folder / "secret").write_text(os.urandom(32).hex())
    (folder / "secret").chmod(0o600)
    _, key = tenants_file.add(folder / "tenants.json", "benchmark")
    text = (
        '[tenants]\nkeys = "tenants.json"\nsecret = "secret"\n[response_cache]\npath = "answers"\n'
    )
    (folder / "serving.toml").write_text(f"timeout_s = 600\n{text}")
    os.environ["VLLM_METAL_SERVING_CONFIG"] = str(folder / "serving.toml")
    try:
        yield key
    finally:
        del os.environ["VLLM_METAL_SERVING_CONFIG"]


def plot(found: Repeats, path: Path) -> None:
    """Plots the total time so far by request."""
    import matplotlib

    matplotlib.use("Agg")
    from itertools import accumulate

    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for label, took in (("without", found.without), ("with the cache", found.with_it)):
        axes.plot([ms / 1000 for ms in accumulate(took)], label=label)
    axes.set_xlabel(f"requests, {found.share:.0%} of them repeats")
    axes.set_ylabel("seconds in all")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def report(added: Added, hits: Hits, repeats: Repeats) -> None:
    """Prints the tables."""
    table(
        ["New requests, ms (median)", "without", "with", "added", "goal"],
        [[f"{added.requests}", added.without, added.with_it, added.added, f"≤ {GOAL_ADDED_MS:g}"]],
    )
    table(
        ["An answer, ms (median)", "computed", "kept", "faster", "goal"],
        [[f"{hits.tokens} tokens", hits.computed, hits.kept, hits.faster, f"≥ {GOAL_FASTER:g}"]],
    )
    sums = [sum(each) / 1000 for each in (repeats.without, repeats.with_it)]
    table(
        ["A stream of requests, s", "without", "with", "gain"],
        [[f"{repeats.share:.0%} repeats, {repeats.tokens} tokens", *sums, repeats.gain]],
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--new-only", action="store_true", help="measure new requests alone")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--start-timeout", type=float, default=300.0, help="seconds")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = args.model or _common.default_model()
    logs = args.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    factor = 10 if args.quick else 1
    load = os.getloadavg()[0]
    note("starting two servers")
    with servers(model, logs, args.start_timeout) as (plain, gated):
        note("new requests, in turn")
        added = measure_added(plain, gated, 1000 // factor)
        if args.new_only:
            print(added)
            return
        note("answers, computed and kept")
        hits = measure_hits(gated, 30 // min(factor, 3), 200)
        note("a stream with repeats")
        repeats = measure_repeats(plain, gated, 200 // factor, 32)
    report(added, hits, repeats)
    found = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "model": Path(model).name,
        "load": [load, os.getloadavg()[0]],
        "added": asdict(added),
        "hits": asdict(hits) | {"faster": hits.faster},
        "repeats": asdict(repeats) | {"gain": repeats.gain},
    }
    (args.out / "serving.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(repeats, args.out / "serving.png")


if __name__ == "__main__":
    main()
