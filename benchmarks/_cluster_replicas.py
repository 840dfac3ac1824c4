# SPDX-License-Identifier: Apache-2.0
"""Measures cached prompt tokens and requests per second of replicas behind a round robin."""

from __future__ import annotations

import itertools
import json
import statistics
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from _cluster_trace import Trace
from _server import Server, ServerError, free_port, in_short, serve
from _shared import note, on_core
from _toy_model import VOCABULARY, Toy

PREFIXES, PREFIX_TOKENS, OWN_TOKENS, ANSWER = 8, 512, 32, 4
_START_S = 900.0  # two cores and several servers
_CLIENTS = 4  # concurrent requests per replica
_REPEATS = 3
TOY = Toy()


@dataclass(frozen=True)
class Shares:
    """Cached shares of a trace's prompt tokens; `seconds`: all requests, one after another."""

    replicas: int
    shared: bool
    share: float
    expected: float
    pulled_tokens: float
    seconds: float
    tokens: list[list[int]]  # of each answer


@dataclass(frozen=True)
class Measured:
    """Results by servers; rates are median requests per second, None for a single server."""

    shares: Shares
    rate_of_first: float | None  # the first server alone, alternating with all
    rate: float | None  # all servers


def _connector(listen: str, peers: Sequence[str]) -> list[str]:
    extra = {"listen": listen, "peers": list(peers), "share": "pool"}
    config = {"kv_connector": "MetalKVConnector", "kv_role": "kv_both"}
    return ["--kv-transfer-config", json.dumps(config | {"kv_connector_extra_config": extra})]


@contextmanager
def replicas(model: str, number: int, shared: bool, folder: Path) -> Iterator[list[Server]]:
    """Runs replicas of a model, each on its own processor while there are enough.

    Raises:
        ServerError: a server did not start.
    """
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(number)]
    requests = PREFIXES * 12
    pool = (PREFIXES * PREFIX_TOKENS + requests * (OWN_TOKENS + 64)) * TOY.token_bytes
    options = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(pool)]
    options += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    with ExitStack() as stack, ThreadPoolExecutor(number) as threads:

        def start(index: int) -> Server:
            others = [address for address in addresses if address != addresses[index]]
            more = _connector(addresses[index], others) if shared else []
            log = folder / f"replica-{number}-{'shared' if shared else 'apart'}-{index}.log"
            with on_core(index):
                return stack.enter_context(serve(model, [*options, *more], log, _START_S))

        yield list(threads.map(start, range(number)))


def _ask(server: Server, prompt: Sequence[int], max_tokens: int = ANSWER) -> tuple[list[int], int]:
    """Returns the answer's tokens and the number of cached prompt tokens."""
    body = {"model": server.model, "prompt": list(prompt), "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = json.loads(server.post("/v1/completions", body, timeout=600))
    cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return reply["choices"][0]["token_ids"], cached


def _pulled(server: Server) -> float:
    """Returns the prompt tokens pulled from peers."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    name = "vllm:prompt_tokens_cached_by_source_total"
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name) and '"p2p"' in x)


def cached(servers: Sequence[Server], trace: Trace, shared: bool) -> Shares:
    """Sends a trace round robin, one request after another."""
    number, found, tokens = len(servers), 0, []
    started = time.perf_counter()
    for index, prompt in enumerate(trace.prompts):
        answer, of_cache = _ask(servers[index % number], prompt)
        found += of_cache
        tokens.append(answer)
    seconds = time.perf_counter() - started
    share = found / sum(map(len, trace.prompts))
    pulled = sum(map(_pulled, servers))
    expected = trace.cached_share(number, shared)
    return Shares(number, shared, share, expected, pulled, seconds, tokens)


def requests_a_second(servers: Sequence[Server], trace: Trace) -> float:
    """Sends a whole trace round robin, with a few concurrent requests per server."""
    places = [servers[index % len(servers)] for index in range(len(trace.prompts))]
    with ThreadPoolExecutor(_CLIENTS * len(servers)) as threads:
        started = time.perf_counter()
        list(threads.map(_ask, places, trace.prompts))
        return len(trace.prompts) / (time.perf_counter() - started)


def trace_of(replicas: int, seed: int) -> Trace:
    """Makes a trace of eight prefixes, each used 1.5 times per replica."""
    asked = max(2, 3 * replicas // 2)
    return Trace.of(PREFIXES, asked, PREFIX_TOKENS, OWN_TOKENS, VOCABULARY, seed)


def measure(counts: Sequence[int], folder: Path) -> Iterator[dict[str, object]]:
    """Measures a trace for one engine, separate replicas and sharing replicas, by number.

    Skips configurations that do not start, with the reason.
    """
    model = TOY.write(folder / "replicas")
    for number in counts:
        kept: dict[str, Measured] = {}
        for name, count, shared in (
            ("one engine", 1, False),
            ("apart", number, False),
            ("sharing", number, True),
        ):
            note(f"{number} replicas' trace: {name}")
            try:
                kept[name] = _measured(model, number, count, shared, folder)
            except ServerError as error:
                print(f"replicas, {name}: skipped: {in_short(error)}")
        yield from rows(kept)


def _measured(model: str, number: int, count: int, shared: bool, folder: Path) -> Measured:
    seeds = itertools.count(100)
    with replicas(model, count, shared, folder) as servers:
        for server in servers:
            _ask(server, [5] * 20)
        found = cached(servers, trace_of(number, seed=number), shared)
        rates: tuple[list[float], list[float]] = [], []
        for _ in range(_REPEATS if count > 1 else 0):
            for asked, kept in zip((servers[:1], servers), rates, strict=True):
                kept.append(requests_a_second(asked, trace_of(number, next(seeds))))
        return Measured(found, *(statistics.median(each) if each else None for each in rates))


def rows(kept: Mapping[str, Measured]) -> Iterator[dict[str, object]]:
    """Yields a table row for each configuration; None where there is nothing to compare with."""
    one = kept["one engine"].shares if "one engine" in kept else None
    for name, measured in kept.items():
        each, rate_of_first, rate = measured.shares, measured.rate_of_first, measured.rate
        yield {
            "servers": f"{name}, {each.replicas}",
            "requests": len(each.tokens),
            "cached": each.share,
            "by arithmetic": each.expected,
            "over one engine's": each.share / one.share if one else None,
            "pulled tokens": each.pulled_tokens,
            "requests/s of the first": rate_of_first,
            "of all": rate,
            "all over first": rate / rate_of_first if rate and rate_of_first else None,
            "answers equal": str(each.tokens == one.tokens) if one else None,
        }
