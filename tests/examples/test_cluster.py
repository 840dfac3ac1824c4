# SPDX-License-Identifier: Apache-2.0
"""The cluster example's front end, with replicas that end, reject or break off."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import attrgetter
from pathlib import Path

import anthropic
import openai
import psutil
import pytest
import relay
from relay import Asked, Gone, Head, answer

GUARD = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "guard.py"
ASKED = Asked("POST", "/v1/completions", (("authorization", "Bearer k"),), b"{}")
STREAM = (("content-type", "text/event-stream; charset=utf-8"),)
WHOLE = (("content-type", "application/json"), ("x-cache", "HIT"))
EVENTS = (b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n")
GONE = object()  # where a replica ends


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "PAUSE_S", 0.0)


class Replicas:
    """Replicas that answer a request in turn, each with given data."""

    def __init__(self, *answers: Sequence[object]) -> None:
        self.asked: list[Asked] = []
        self._answers = list(answers)

    async def send(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        self.asked.append(asked)
        for piece in self._answers.pop(0):
            if piece is GONE:
                raise Gone
            assert isinstance(piece, Head | bytes)
            yield piece


def head(replica: str, status: int = 200, headers: tuple[tuple[str, str], ...] = WHOLE) -> Head:
    return Head(replica, status, headers)


def stream(replica: str) -> Head:
    return head(replica, headers=STREAM)


def ask(replicas: Replicas) -> tuple[Head, bytes]:
    """Returns the answer's head and whole body, as a client gets them."""

    async def read() -> tuple[Head, bytes]:
        found = await answer(replicas.send, ASKED)
        if isinstance(found.body, bytes):
            return found.head, found.body
        return found.head, b"".join([piece async for piece in found.body])

    return asyncio.run(read())


def test_an_answer_is_passed_on_as_it_is() -> None:
    replicas = Replicas([head("a", 400), b'{"error"', b": 1}"])
    assert ask(replicas) == (head("a", 400), b'{"error": 1}')
    assert replicas.asked == [ASKED]


def test_a_stream_is_passed_on_as_it_comes() -> None:
    """The first event arrives before the second is made."""
    made = []

    async def send(asked: Asked) -> AsyncIterator[Head | bytes]:
        yield stream("a")
        for event in EVENTS:
            made.append(event)
            yield event

    async def read() -> list[tuple[bytes, int]]:
        found = await answer(send, ASKED)
        assert not isinstance(found.body, bytes)
        return [(piece, len(made)) async for piece in found.body]

    assert asyncio.run(read()) == list(zip(EVENTS, (1, 2, 3), strict=True))


@pytest.mark.parametrize(
    "ended",
    [
        [GONE],
        [],
        [stream("a"), GONE],
        [stream("a")],
        [head("a"), GONE],
        [head("a"), b'{"text": "th', GONE],  # nobody has seen this part
    ],
)
def test_without_a_first_byte_it_is_sent_again(ended: Sequence[object]) -> None:
    replicas = Replicas(ended, [stream("b"), *EVENTS])
    assert ask(replicas) == (stream("b"), b"".join(EVENTS))
    assert replicas.asked == [ASKED, ASKED]


def test_one_that_takes_no_requests_is_not_asked_again() -> None:
    replicas = Replicas([head("a", 503), b"full"], [head("b"), b"{}"])
    assert ask(replicas) == (head("b"), b"{}")
    assert [asked.avoid for asked in replicas.asked] == [frozenset(), frozenset({"a"})]


def test_where_all_refuse_the_client_is_told_when_to_ask_again() -> None:
    busy = head("a", 503, (("retry-after", "15"),))
    replicas = Replicas([busy, b"full"], [busy, b"full"], [head("b"), b"{}"])
    assert ask(replicas) == (busy, b"full")
    assert len(replicas.asked) == 2


def test_a_refusal_stands_where_the_others_end_afterwards() -> None:
    busy = head("a", 503, (("retry-after", "15"),))
    assert ask(Replicas([busy, b"full"], [GONE], [GONE], [GONE])) == (busy, b"full")


def test_what_ends_every_replica_is_not_sent_to_all_there_are() -> None:
    replicas = Replicas(*[[GONE]] * 9)
    found, body = ask(replicas)
    assert (found.status, len(replicas.asked)) == (502, relay.TRIES)
    assert "No server" in json.loads(body)["error"]["message"]


def test_one_that_was_begun_is_not_sent_again() -> None:
    replicas = Replicas([stream("a"), EVENTS[0], EVENTS[1][:7], GONE], [stream("b"), *EVENTS])
    _, body = ask(replicas)
    assert len(replicas.asked) == 1
    assert body.startswith(EVENTS[0] + b"event: error\n")  # whole events only
    assert EVENTS[2] not in body


class Front(BaseHTTPRequestHandler):
    """Sends every client a stream that breaks off after an ignorable event."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        event = b'event: ping\ndata: {"id": "a", "type": "ping", "choices": []}\n\n'
        _, body = ask(Replicas([stream("a"), event, GONE]))
        self.send_response(200)
        self.send_header(*STREAM[0])
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


SAID = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("completions", {"prompt": "a"}),
        ("chat.completions", {"messages": SAID}),
        ("responses", {"input": "a"}),
    ],
)
def test_openais_client_raises_where_a_stream_breaks_off(url: str, api: str, fields: dict) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k") as client:
        events = attrgetter(api)(client).create(model="m", stream=True, **fields)
        next(events)
        with pytest.raises(openai.APIError, match="before its answer was complete"):
            next(events)


def test_anthropics_client_raises_where_a_stream_breaks_off(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="k") as client:
        events = client.messages.create(model="m", max_tokens=9, messages=SAID, stream=True)
        with pytest.raises(anthropic.APIError, match="before its answer was complete"):
            list(events)


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_gone(process: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


#: Starts a process of its own, names both, and waits.
_SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, file=sys.stderr, flush=True)
time.sleep(600)
"""
_REPLICA = """
import subprocess, sys, time
guard, server = sys.argv[1:]
command = [sys.executable, "-S", guard, sys.executable, "-S", "-c", server]
subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
time.sleep(600)
"""


def test_a_server_ends_with_its_replica() -> None:
    command = [sys.executable, "-S", "-c", _REPLICA, str(GUARD), _SERVER]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as replica:
        assert replica.stderr is not None
        processes = [psutil.Process(int(pid)) for pid in replica.stderr.readline().split()]
        assert len(processes) == 2 and all(alive(process) for process in processes)
        os.killpg(replica.pid, signal.SIGKILL)  # as Ray does, and it can end nothing itself
    for process in processes:
        wait_until_gone(process)


def test_a_replica_learns_that_its_server_ended() -> None:
    command = [sys.executable, "-S", str(GUARD), sys.executable, "-S", "-c", _SERVER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as guard:  # type: ignore[call-overload]
        server, its_child = (psutil.Process(int(pid)) for pid in guard.stderr.readline().split())
        server.kill()
        assert guard.stdout.read() == b""  # comes when the pipe is closed
    wait_until_gone(its_child)
