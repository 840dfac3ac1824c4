# SPDX-License-Identifier: Apache-2.0
"""Replicas that share what is in their pools, in this process and thread, over the real transport."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

from e2e.disk import HITS
from e2e.harness import counters, engine, free_blocks, greedy, run_out
from e2e.peers import Served, free_port, role_engine
from vllm import LLM, TokensPrompt

_NUMBERS = count()


def core_of(llm: LLM) -> Any:
    """The engine core of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core


def alone(model: str, prompts: Sequence[list[int]], max_tokens: int = 12, **options: Any) -> Any:
    """What one engine makes of each, all at once."""
    with role_engine(model, None, **options) as llm:
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts],
            greedy(max_tokens),
            use_tqdm=False,
        )
    return [list(output.outputs[0].token_ids) for output in outputs]


class Replicas:
    """Engines each of which asks all others; all make steps in turns, as if each had a process.

    One that others wake makes steps as a server's engine does: see `test_engine_wake.py`.
    """

    def __init__(self, model: str, number: int, share: bool = True, **options: Any) -> None:
        """
        Args:
            model: of all.
            number: of engines.
            share: whether they ask each other.
            options: of each engine.
        """
        self._make = model, number, share, options
        self._stack = ExitStack()
        self.engines: list[LLM] = []

    def __enter__(self) -> Replicas:
        model, number, share, options = self._make
        extra = options.pop("extra", {})
        ports = [free_port() for _ in range(number)]
        for index in range(number):
            role: dict[str, Any] = {}
            if share:
                peers = [f"127.0.0.1:{port}" for n, port in enumerate(ports) if n != index]
                settings = {"listen": f"127.0.0.1:{ports[index]}", "share": "pool", "peers": peers}
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
        """A step of each that has something to do; what has ended, and whose it is."""
        ended = []
        for index, llm in enumerate(self.engines):
            core = core_of(llm)
            if core.scheduler.has_requests() or core.batch_queue:
                outputs = llm.llm_engine.step()
                ended += [(index, output) for output in outputs if output.finished]
        return ended

    def begin(self, index: int, prompt: list[int], max_tokens: int = 12) -> str:
        """Sends a request to an engine; its id."""
        req_id = f"r{next(_NUMBERS)}"
        self.engines[index].llm_engine.add_request(
            req_id, TokensPrompt(prompt_token_ids=prompt), greedy(max_tokens)
        )
        return req_id

    def run(self, *req_ids: str) -> dict[str, list[int]]:
        """Steps until these have ended; the tokens of all that did."""
        found: dict[str, list[int]] = {}
        deadline = time.monotonic() + 60
        while not found.keys() >= set(req_ids):
            assert time.monotonic() < deadline, "a request never ends"
            for _, output in self.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
        return found

    def run_out(self) -> None:
        """Steps until none has anything to do, and goes on for the word of a peer to come."""
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
        """An engine's greedy answer, while the others do what it asks of them."""
        before = counters(self.engines[index])
        req_id = self.begin(index, prompt, max_tokens)
        tokens = self.run(req_id)[req_id]
        self.run_out()
        after = counters(self.engines[index])

        def added(name: str) -> float:
            return after.get(name, 0) - before.get(name, 0)

        return Served(
            tokens,
            added(HITS),
            added("vllm:spec_decode_num_draft_tokens"),
            added("vllm:spec_decode_num_accepted_tokens"),
        )
