# SPDX-License-Identifier: Apache-2.0
"""Streaming-input sessions on an in-process engine, and the text of each turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from e2e.harness import Dense
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind


def streamed(**options: Any) -> SamplingParams:
    """Returns greedy parameters for sessions: each output has the tokens since the previous one."""
    kind = RequestOutputKind.DELTA
    options = {"temperature": 0, "detokenize": False, "ignore_eos": True} | options
    return SamplingParams(output_kind=kind, **options)


def whole_texts(
    turns: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Returns the full text that each turn's answer continues.

    That is everything before it without the last token of each answer, which vLLM's sessions drop.
    """
    texts, text = [], []
    for turn, answer in zip(turns, answers, strict=True):
        text = [*text, *turn]
        texts.append(text)
        text = [*text, *answer[:-1]]
    return texts


def check(dense: Dense, turns: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """Asserts that each answer is the greedy continuation of the whole text."""
    for text, answer in zip(whole_texts(turns, answers), answers, strict=True):
        dense.check(text, list(answer))


@dataclass(eq=False)
class Session:
    """A session whose turns are sent as vLLM's AsyncLLM does."""

    llm: LLM
    name: str
    params: SamplingParams
    answers: list[list[int]] = field(default_factory=list)  # of completed turns
    logprobs: list[list[Any]] = field(default_factory=list)  # of their tokens, if requested
    reasons: list[tuple[str, Any]] = field(default_factory=list)  # finish reason and stop reason
    finished: bool = False  # as reported by the engine's front end
    _new: list[int] = field(default_factory=list)
    _new_logprobs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._final = self._request([0], self.params, resumable=False)
        self.llm.llm_engine.input_processor.assign_request_id(self._final)

    @property
    def req_id(self) -> str:
        return self._final.request_id

    def _request(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        resumable: bool,
        salt: str | None = None,
    ) -> Any:
        engine = self.llm.llm_engine
        prompt = {"prompt_token_ids": list(tokens)} | ({"cache_salt": salt} if salt else {})
        return engine.input_processor.process_inputs(
            self.req_id if resumable else self.name,
            prompt,
            params.clone(),
            supported_tasks=engine.get_supported_tasks(),
            resumable=resumable,
        )

    def send(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        salt: str | None = None,
    ) -> None:
        """Sends a turn, which starts when the previous one has ended."""
        request = self._request(tokens, params or self.params, resumable=True, salt=salt)
        request.external_req_id = self.name
        self._add(request)

    def ask(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        salt: str | None = None,
    ) -> list[int]:
        """Sends a turn, and steps until it is answered."""
        count = len(self.answers) + 1
        self.send(tokens, params, salt)
        step_until(self.llm, [self], lambda: len(self.answers) == count)
        return self.answers[-1]

    def close(self) -> None:
        """Ends the session."""
        if not self.finished:
            self._add(self._final)

    def _add(self, request: Any) -> None:
        engine = self.llm.llm_engine
        engine.output_processor.add_request(request, None, None, 0, None)
        # In another process it is another list; both sides extend theirs with each turn.
        sent = copy(request)
        sent.prompt_token_ids = list(request.prompt_token_ids)
        engine.engine_core.add_request(sent)

    def take(self, output: RequestOutput) -> None:
        (completion,) = output.outputs
        self._new += completion.token_ids
        self._new_logprobs += completion.logprobs or []
        self.finished |= output.finished
        if completion.finish_reason is not None:
            self.answers.append(self._new)
            self.logprobs.append(self._new_logprobs)
            self.reasons.append((completion.finish_reason, completion.stop_reason))
            self._new, self._new_logprobs = [], []


def step_until(
    llm: LLM, sessions: Iterable[Session], done: Callable[[], bool]
) -> list[RequestOutput]:
    """Steps until `done` is true for all; returns outputs of other requests."""
    by_name, others = {session.name: session for session in sessions}, []
    deadline = time.monotonic() + 120
    while not done():
        for output in llm.llm_engine.step():
            if output.request_id in by_name:
                by_name[output.request_id].take(output)
            else:
                others.append(output)
        assert time.monotonic() < deadline, "a turn never ends"
    return others


def play(llm: LLM, scripts: dict[Session, Sequence[Sequence[int]]], ahead: bool = False) -> None:
    """Plays sessions concurrently to their ends.

    Args:
        llm: the engine.
        scripts: turns of each session.
        ahead: send all turns at first; otherwise each after the previous answer.
    """
    sent = dict.fromkeys((session.name for session in scripts), 0)  # turns, and then the end

    def send_on() -> bool:
        for session, turns in scripts.items():
            while (count := sent[session.name]) <= len(turns):
                if not ahead and len(session.answers) < count:
                    break
                if count < len(turns):
                    session.send(turns[count])
                else:
                    session.close()
                sent[session.name] += 1
        return all(
            len(session.answers) == len(turns) < sent[session.name]
            for session, turns in scripts.items()
        )

    step_until(llm, scripts, send_on)


def ask_once(llm: LLM, text: Sequence[int], params: SamplingParams) -> Session:
    """Sends an ordinary request; `LLM.generate` only returns if no session is open."""
    request = Session(llm, f"once {time.monotonic()}", params)
    request.ask(text)
    request.close()
    return request


def held_rows(llm: LLM) -> int:
    """Returns the number of requests known to the worker, running or preempted."""
    (held,) = llm.collective_rpc(lambda worker: worker.num_requests)
    return int(held)
