# SPDX-License-Identifier: Apache-2.0
"""In-process replicas that share their pools over the real transport."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from e2e.harness import greedy, run_out
from e2e.peers import free_port, peer_store, role_engine
from vllm import LLM, RequestOutput, TokensPrompt

from vllm_metal.kv_transfer.peer import limits, view
from vllm_metal.kv_transfer.peer.store import PeerMetrics

_NUMBERS = count()


def core_of(llm: LLM) -> Any:
    """Returns the engine core of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core


def peer_metrics(llm: LLM) -> PeerMetrics:
    """Returns an engine's peer metrics; engines in one process share vLLM's counters."""
    return peer_store(llm).metrics()


def pins(llm: LLM) -> int:
    """Returns the number of pool blocks that are kept for peers."""
    return len(core_of(llm).scheduler.connector.pins)


def tokens_of(output: RequestOutput) -> list[int]:
    """Returns an answer's tokens."""
    return list(output.outputs[0].token_ids)


@dataclass(frozen=True)
class Served:
    """A request's answer, and its sources."""

    tokens: list[int]
    cached: int  # prompt tokens that were not computed
    pulled: int  # pages pulled from peers


def alone(model: str, prompts: Sequence[list[int]], max_tokens: int = 12, **options: Any) -> Any:
    """Returns a single engine's outputs for all prompts, sent at once."""
    with role_engine(model, None, **options) as llm:
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            greedy(max_tokens),
            use_tqdm=False,
        )
    return [tokens_of(output) for output in outputs]


@contextmanager
def patience() -> Iterator[None]:
    """Sets all timeouts to a minute, so that slow machines give up no peer."""
    kinds = [each for each in vars(limits).values() if isinstance(each, limits.Timeouts)]
    names = ("connect", "no_progress", "wait")
    before = [{name: getattr(each, name) for name in names} for each in kinds]
    try:
        for each in kinds:
            vars(each).update(dict.fromkeys(names, 60.0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(view, "LOOKUP_SECONDS", 60.0)
            yield
    finally:
        for each, values in zip(kinds, before, strict=True):
            vars(each).update(values)


class Replicas:
    """Engines that all contact each other, stepping in turn as if each had its own process.

    A woken one steps as a server's engine does: see `test_engine_wake.py`.
    """

    def __init__(self, model: str, number: int, share: bool = True, **options: Any) -> None:
        """
        Args:
            model: the model of all engines.
            number: number of engines.
            share: whether they contact each other.
            options: options of each engine.
        """
        self._make = model, number, share, options
        self._shares = share
        self._stack = ExitStack()
        self.engines: list[LLM] = []

    def __enter__(self) -> Replicas:
        model, number, share, options = self._make
        extra = options.pop("extra", {})
        self._stack.enter_context(patience())
        ports = [free_port() for _ in range(number)]
        for index in range(number):
            role: dict[str, Any] = {}
            if share:
                peers = [f"127.0.0.1:{port}" for n, port in enumerate(ports) if n != index]
                settings = {"listen": f"127.0.0.1:{ports[index]}", "share": "pool", "peers": peers}
                settings |= {"pull": "always"}  # even if computing is faster
                role = {"extra": settings | extra}
            llm = self._stack.enter_context(
                role_engine(model, "kv_both" if share else None, **role, **options)
            )
            self.engines.append(llm)
            if share:
                core_of(llm).scheduler.connector.wake_by(lambda: True)
        return self

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            self.run_out()
        self._stack.__exit__(*error)

    def __getitem__(self, index: int) -> LLM:
        return self.engines[index]

    def step(self) -> list[tuple[int, Any]]:
        """Steps each engine that has work; returns (engine, output) of ended requests."""
        ended = []
        for index, llm in enumerate(self.engines):
            core = core_of(llm)
            if core.scheduler.has_requests() or core.batch_queue:
                outputs = llm.llm_engine.step()
                ended += [(index, output) for output in outputs if output.finished]
        return ended

    def begin(self, index: int, prompt: list[int], max_tokens: int = 12) -> str:
        """Sends a request to an engine; returns its id."""
        req_id = f"r{next(_NUMBERS)}"
        self.engines[index].llm_engine.add_request(
            req_id, TokensPrompt(prompt_token_ids=prompt), greedy(max_tokens)
        )
        return req_id

    def run(self, *req_ids: str) -> dict[str, RequestOutput]:
        """Steps until these requests have ended; returns the outputs of all ended ones by id."""
        found: dict[str, RequestOutput] = {}
        deadline = time.monotonic() + 240
        while not found.keys() >= set(req_ids):
            assert time.monotonic() < deadline, "a request never ends"
            for _, output in self.step():
                found[output.request_id] = output
        return found

    def run_out(self) -> None:
        """Steps until no engine has work or keeps a block for a peer."""
        deadline = time.monotonic() + 240
        while True:
            self._run_out()
            kept = self._shares and any(
                pins(e) or peer_metrics(e).shared_leases for e in self.engines
            )
            if not kept or time.monotonic() > deadline:
                return

    def _run_out(self) -> None:
        """Keeps stepping until peers' messages have arrived."""
        quiet = time.monotonic()
        while time.monotonic() < quiet + 0.2:
            if any(core_of(each).scheduler.has_requests() for each in self.engines):
                self.step()
                quiet = time.monotonic()
            else:
                for each in self.engines:
                    run_out(each)
                time.sleep(0.01)

    def ask(self, index: int, prompt: list[int], max_tokens: int = 12) -> Served:
        """Returns an engine's greedy answer, while the others serve its requests."""
        before = self._fetched(index)
        req_id = self.begin(index, prompt, max_tokens)
        output = self.run(req_id)[req_id]
        pulled = self._fetched(index) - before
        return Served(tokens_of(output), output.num_cached_tokens or 0, pulled)

    def _fetched(self, index: int) -> int:
        return peer_metrics(self.engines[index]).fetched_pages if self._shares else 0
