# SPDX-License-Identifier: Apache-2.0
"""Gaps and transfers measured by benchmarks/disaggregated.py."""

import http.server
import json
from collections.abc import Iterator

import _peer_pulls
import pytest
from _apart import Stream, Window, answer, request
from _server import Server


class Tokens(http.server.BaseHTTPRequestHandler):
    """Streams the requested number of tokens without a pause, in vLLM's format."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(json.dumps(body).encode())
            return
        for _ in range(body["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(serving) -> Iterator[Server]:
    with serving(Tokens) as server:
        yield server


def test_a_stream_notes_when_each_token_came(server: Server) -> None:
    with Stream(server, [1, 2], 30) as stream:
        stream.await_tokens(30)
        assert len(stream.times) == 30
        assert stream.times == sorted(stream.times)


def test_a_stream_that_is_too_short_is_an_error(server: Server) -> None:
    with Stream(server, [1], 3) as stream, pytest.raises(RuntimeError, match="ended early"):
        stream.await_tokens(4)


def test_gaps_count_where_they_overlap_a_time(server: Server) -> None:
    with Stream(server, [1], 1) as stream:
        pass  # it has been read when the block ends
    stream.times = [0.0, 1.0, 3.0, 3.5, 6.0]
    assert stream.gaps(1.5, 3.2) == [2.0, 0.5]
    assert stream.gaps(3.0, 3.5) == [0.5]
    assert stream.gaps(4.0, 5.0) == [2.5]  # a stall that is longer than the time itself
    assert stream.gaps(7.0, 8.0) == []
    window = Window()
    window.note([stream, stream], 1.5, 3.2)
    assert (window.gaps, window.seconds) == ([2.0, 0.5] * 2, [pytest.approx(1.7)])


def test_a_request_is_greedy_and_of_the_length_asked_for(server: Server) -> None:
    sent = answer(server, request(server, (5, 6), 7))
    assert (sent["prompt"], sent["max_tokens"]) == ([5, 6], 7)
    assert sent["ignore_eos"] and sent["temperature"] == 0


@pytest.mark.more
def test_pulls_and_plain_sockets_move_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_peer_pulls, "PAGE_BYTES", (40_000,))
    rates = _peer_pulls.measure_pulls(total_bytes=500_000, repeats=2)
    assert [(each.page_bytes, each.connections) for each in rates] == [(40_000, 1), (40_000, 2)]
    assert all(min(each.pulled, each.plain, each.ratio) > 0 for each in rates)
