# SPDX-License-Identifier: Apache-2.0
"""The growing chat of benchmarks/peers.py, with a fake server."""

import http.server
import json
from collections.abc import Iterator
from typing import Any

import pytest
from _peers_chat import chat, questions
from _server import Server, ServerError

asked: list[dict[str, Any]] = []
PIECES = ["", "yes", " it", " is"]  # the first names the role only


class Chats(http.server.BaseHTTPRequestHandler):
    """Streams a comment, pieces of an answer, then the usage in an event without choices."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked.append(body)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": keepalive 0/1\n\n")
        for piece in PIECES if body["max_tokens"] > 1 else []:
            self.event({"choices": [{"delta": {"role": "assistant", "content": piece}}]})
        words = sum(len(message["content"].split()) for message in body["messages"])
        details = {"cached_tokens": words - 5} if len(body["messages"]) > 1 else None
        usage = {"prompt_tokens": words, "prompt_tokens_details": details}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, content: object) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(serving) -> Iterator[Server]:
    asked.clear()
    with serving(Chats) as server:
        yield server


def test_each_turn_has_all_that_was_said_before(server: Server) -> None:
    says = ["one two", "three four five"]
    turns = chat(server, says, 8, {"ignore_eos": True})
    assert [body["messages"] for body in asked] == [
        [{"role": "user", "content": "one two"}],
        [
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "yes it is"},
            {"role": "user", "content": "three four five"},
        ],
    ]
    assert all(body["ignore_eos"] and body["max_tokens"] == 8 for body in asked)
    assert [(turn.prompt_tokens, turn.cached_tokens) for turn in turns] == [(2, 0), (8, 3)]
    assert all(0 < turn.ttft_ms <= 1e3 * turn.seconds for turn in turns)


def test_an_answer_without_text_is_an_error(server: Server) -> None:
    with pytest.raises(ServerError, match="sent no text"):
        chat(server, ["one"], 1, {})


def test_chats_of_different_seeds_share_no_beginning() -> None:
    first, second = questions(10, 20, seed=0), questions(10, 20, seed=1)
    assert len(first) == 10 and len(set(first)) == 10
    assert all(len(text.split()) == 22 for text in first)
    assert first[0].split()[1] != second[0].split()[1]
    assert first == questions(10, 20, seed=0)
