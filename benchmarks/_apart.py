# SPDX-License-Identifier: Apache-2.0
"""Measures a decode server's streams while prompts are prefilled by it or by another server."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field

from _kv_streams import Gaps
from _server import Server, counter

#: Asks a server to prefill for another one, in vLLM's form.
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
WARM_TOKENS = 12
_TIMEOUT_S = 1800.0  # long prompts beside streams are slow on two cores
_STREAM_PROMPT = 60  # tokens


class Stream:
    """A request that decodes until it is stopped; a thread reads its tokens."""

    def __init__(self, server: Server, prompt: Sequence[int], max_tokens: int) -> None:
        self.times: list[float] = []  # arrival time of each token
        self._server = server
        self._response: http.client.HTTPResponse | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(list(prompt), max_tokens))
        self._thread.start()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection, on which the server aborts the request."""
        self._stopped.set()
        self._thread.join()

    def _read(self, prompt: list[int], max_tokens: int) -> None:
        body = request(self._server, prompt, max_tokens) | {"stream": True}
        with _post(self._server, body) as reply:
            for line in reply:
                if self._stopped.is_set():
                    return
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())

    def await_tokens(self, number: int) -> None:
        """Waits until `number` more tokens have arrived.

        Raises:
            RuntimeError: the stream has ended.
        """
        wanted = len(self.times) + number
        while True:
            has_ended = not self._thread.is_alive()  # asked first: the last tokens may come now
            if len(self.times) >= wanted:
                return
            if has_ended:
                raise RuntimeError("a stream ended early: its answer was too short, or failed")
            time.sleep(0.01)

    def gaps(self, start: float, end: float) -> list[float]:
        """Returns the seconds between tokens, for gaps that overlap [start, end]."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [after - before for before, after in pairs if before < end and after > start]


def request(server: Server, prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    """Returns the body of a completion request with exactly `max_tokens` tokens."""
    return {
        "model": server.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _post(server: Server, body: dict[str, object]) -> http.client.HTTPResponse:
    sent = urllib.request.Request(
        f"{server.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(sent, timeout=_TIMEOUT_S)


def answer(server: Server, body: dict[str, object]) -> dict:
    """Returns the reply to a completion request."""
    with _post(server, body) as reply:
        return json.load(reply)


def metric(server: Server, name: str) -> float:
    """Returns a counter from the server's /metrics."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        return counter(reply.read().decode(), f"vllm:{name}_total")


@dataclass
class Window:
    """Measurements in time windows of one kind."""

    gaps: list[float] = field(default_factory=list)  # seconds, over all streams
    seconds: list[float] = field(default_factory=list)  # length of each window

    def note(self, streams: Sequence[Stream], start: float, end: float) -> None:
        for stream in streams:
            self.gaps += stream.gaps(start, end)
        self.seconds.append(end - start)


#: In table order.
ALONE = "no prompt"
ONE = "one server does both"
PREFILLING, PULLING = "apart: P prefills", "apart: D pulls"


class Apart:
    """Measures streams on a decode server while prompts arrive, prefilled in two ways by turns."""

    def __init__(self, prefill: Server, decode: Server, num_streams: int) -> None:
        self._prefill = prefill
        self._decode = decode
        self._num_streams = num_streams
        self._windows = {name: Window() for name in (ALONE, ONE, PREFILLING, PULLING)}
        self._pulled = 0.0
        self._wanted = 0

    def round(self, number: int, prompts: Sequence[Sequence[int]], alone_tokens: int) -> None:
        """Runs each way once; which is first alternates.

        Args:
            number: the round's number.
            prompts: two, new to both servers, equally long.
            alone_tokens: tokens each stream gets before the first prompt.
        """
        with ExitStack() as stack:
            starts = [
                [7 + number, 11 + place, *range(20, 20 + _STREAM_PROMPT - 2)]
                for place in range(self._num_streams)
            ]
            longest = 20 * len(prompts[0]) + 1000  # stopped explicitly
            room = min(longest, 8000 - _STREAM_PROMPT)
            streams = [stack.enter_context(Stream(self._decode, s, room)) for s in starts]
            for stream in streams:
                stream.await_tokens(WARM_TOKENS)
            begun = time.perf_counter()
            for stream in streams:
                stream.await_tokens(alone_tokens)
            self._windows[ALONE].note(streams, begun, time.perf_counter())
            ways = (self._by_one, self._by_two)
            for way, prompt in zip(ways if number % 2 else ways[::-1], prompts, strict=True):
                way(streams, prompt)
                for stream in streams:
                    stream.await_tokens(WARM_TOKENS)

    def _by_one(self, streams: Sequence[Stream], prompt: Sequence[int]) -> None:
        before = metric(self._decode, "external_prefix_cache_hits")
        start = time.perf_counter()
        answer(self._decode, request(self._decode, prompt, 1))
        end = time.perf_counter()
        assert metric(self._decode, "external_prefix_cache_hits") == before, "D did not prefill"
        self._await_and_note(streams, ONE, start, end)

    def _by_two(self, streams: Sequence[Stream], prompt: Sequence[int]) -> None:
        before = metric(self._decode, "external_prefix_cache_hits")
        body = request(self._prefill, prompt, 1) | {"kv_transfer_params": PREFILL_ONLY}
        start = time.perf_counter()
        params = answer(self._prefill, body).get("kv_transfer_params")
        between = time.perf_counter()
        answer(self._decode, request(self._decode, prompt, 1) | {"kv_transfer_params": params})
        end = time.perf_counter()
        self._pulled += metric(self._decode, "external_prefix_cache_hits") - before
        self._wanted += len(prompt)
        self._await_and_note(streams, PREFILLING, start, between)
        self._await_and_note(streams, PULLING, between, end)

    def _await_and_note(
        self, streams: Sequence[Stream], name: str, start: float, end: float
    ) -> None:
        for stream in streams:  # so that a gap still open at the end is included
            with suppress(RuntimeError):
                stream.await_tokens(2)
        self._windows[name].note(streams, start, end)

    def metrics(self) -> dict[str, object]:
        """Returns results for JSON: gaps in milliseconds, ratios of 99th percentiles, seconds."""
        windows = {name: window for name, window in self._windows.items() if window.gaps}
        gaps = {name: Gaps.of(window.gaps) for name, window in windows.items()}
        apart = [*self._windows[PREFILLING].gaps, *self._windows[PULLING].gaps]
        return {
            "ms": {name: asdict(of_name) for name, of_name in gaps.items()},
            "seconds": {name: window.seconds for name, window in windows.items()},
            "p99_one_over_apart": gaps[ONE].p99 / Gaps.of(apart).p99,
            "p99_one_over_pulling": gaps[ONE].p99 / gaps[PULLING].p99,
            "pulled_tokens": self._pulled,
            "prompt_tokens": self._wanted,
        }
