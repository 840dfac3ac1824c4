# SPDX-License-Identifier: Apache-2.0
"""Replicas behind a round robin: what of prompts is cached, and requests a second."""

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
_CLIENTS = 4  # at once, of each replica
_REPEATS = 3
TOY = Toy()


@dataclass(frozen=True)
class Shares:
    """Cached shares of a trace's prompt tokens; `seconds` of all requests, one after another."""

    replicas: int
    shared: bool
    share: float
    expected: float
    pulled_tokens: float
    seconds: float
    tokens: list[list[int]]  # of the answers


@dataclass(frozen=True)
class Measured:
    """What servers did. Rates are requests a second, medians; None: there is one server."""

    shares: Shares
    rate_of_first: float | None  # asked alone, in turns with all
    rate: float | None  # of all


def _connector(listen: str, peers: Sequence[str]) -> list[str]:
    extra = {"listen": listen, "peers": list(peers), "share": "pool"}
    config = {"kv_connector": "MetalKVConnector", "kv_role": "kv_both"}
    return ["--kv-transfer-config", json.dumps(config | {"kv_connector_extra_config": extra})]


@contextmanager
def replicas(model: str, number: int, shared: bool, folder: Path) -> Iterator[list[Server]]:
    """Servers of a model, each on a processor of its own as far as there are so many.

    Raises:
        ServerError: one did not start.
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
    """The answer's tokens, and how many of the prompt's were cached."""
    body = {"model": server.model, "prompt": list(prompt), "max_tokens": max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = json.loads(server.post("/v1/completions", body, timeout=600))
    cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return reply["choices"][0]["token_ids"], cached


def _pulled(server: Server) -> float:
    """Prompt tokens that came from a peer."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    name = "vllm:prompt_tokens_cached_by_source_total"
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name) and '"p2p"' in x)


def cached(servers: Sequence[Server], trace: Trace, shared: bool) -> Shares:
    """Asks a trace in turns, one request after another."""
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
    """All of a trace at once, in turns, a few at each server at a time."""
    places = [servers[index % len(servers)] for index in range(len(trace.prompts))]
    with ThreadPoolExecutor(_CLIENTS * len(servers)) as threads:
        started = time.perf_counter()
        list(threads.map(_ask, places, trace.prompts))
        return len(trace.prompts) / (time.perf_counter() - started)


def trace_of(replicas: int, seed: int) -> Trace:
    """Of eight prefixes, each asked 1.5 times for each replica."""
    asked = max(2, 3 * replicas // 2)
    return Trace.of(PREFIXES, asked, PREFIX_TOKENS, OWN_TOKENS, VOCABULARY, seed)


def measure(counts: Sequence[int], folder: Path) -> Iterator[dict[str, object]]:
    """Asks a trace for each number of replicas: of one engine, of servers apart, of sharing ones.

    What does not start is left out, with the reason.
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
    """A row for each kind of servers; None stands where there is nothing to compare with."""
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
