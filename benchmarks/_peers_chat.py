# SPDX-License-Identifier: Apache-2.0
"""Runs a growing chat over any server with OpenAI's API."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from _server import Server, ServerError

_TIMEOUT_S = 1800.0
# Frequent words; nearly all are one token of any vocabulary.
_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night
point home water room mother area money story fact month lot right study book
"""


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    ttft_ms: float  # until the first text
    seconds: float  # until the answer is complete
    prompt_tokens: int  # of the whole chat so far
    cached_tokens: int  # prompt tokens that were not computed again


def questions(number: int, words: int, seed: int) -> list[str]:
    """Returns the user's message of each turn; different seeds share no prefix."""
    rng, known = random.Random(seed), _WORDS.split()
    return [
        f"Question {seed}.{turn}: " + " ".join(rng.choices(known, k=words))
        for turn in range(number)
    ]


def chat(
    server: Server, says: Sequence[str], max_tokens: int, extra: Mapping[str, object]
) -> list[Turn]:
    """Runs a chat with the server's own answers in its history.

    Args:
        server: a server with OpenAI's chat completions.
        says: the user's messages.
        max_tokens: maximum tokens of an answer.
        extra: more request fields, such as those that prevent early ends.

    Raises:
        ServerError: no text was sent, or the token counts are wrong.
    """
    messages: list[dict[str, str]] = []
    turns = []
    for text in says:
        messages.append({"role": "user", "content": text})
        body = {
            "model": server.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        answer, turn = _turn(server, body)
        messages.append({"role": "assistant", "content": answer})
        turns.append(turn)
    return turns


def _turn(server: Server, body: Mapping[str, object]) -> tuple[str, Turn]:
    started = time.perf_counter()
    first, pieces, usage = None, [], None
    for event in _events(server, body):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if piece := choice["delta"].get("content"):
                first = first or time.perf_counter()
                pieces.append(piece)
    ended = time.perf_counter()
    if first is None or usage is None:
        raise ServerError(f"{server.url} sent no text or no usage; see {server.log}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    turn = Turn(1e3 * (first - started), ended - started, usage["prompt_tokens"], cached)
    return "".join(pieces), turn


def _events(server: Server, body: Mapping[str, object]) -> Iterator[dict]:
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
