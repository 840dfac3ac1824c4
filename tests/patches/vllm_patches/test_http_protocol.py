# SPDX-License-Identifier: Apache-2.0
"""Limits of a connection to a real uvicorn, in size and time."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import uvicorn

from vllm_metal.patches.vllm_patches import http_protocol
from vllm_metal.patches.vllm_patches.http_protocol import HANG_UP, LimitedHttp

MAX_BYTES, MAX_HEADERS = 1 << 16, 20
LONG = 20 * 10**6  # bytes: more than the buffers of two sockets


class App:
    """Answers "ok", more on /long, and endlessly on /hang-up."""

    def __init__(self):
        self.headers = []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            raise NotImplementedError  # uvicorn goes on without
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/hang-up":
            for _ in range(1000):
                part = {"type": "http.response.body", "body": b"x" * 10**5, "more_body": True}
                try:
                    await asyncio.wait_for(send(part), 0.2)
                except TimeoutError:
                    scope["extensions"][HANG_UP]["call"]()
                    return
        body = b"y" * LONG if scope["path"] == "/long" else b"ok"
        await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def running(http=LimitedHttp, app=None):
    """A server's address, and its application."""
    app = app or App()
    config = uvicorn.Config(app, port=0, http=http, log_level="critical", lifespan="off")
    config.h11_max_incomplete_event_size = MAX_BYTES
    config.h11_max_header_count = MAX_HEADERS
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        app.connections = server.server_state.connections
        while not server.started:
            assert thread.is_alive()
        yield server.servers[0].sockets[0].getsockname(), app
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture
def server():
    with running() as found:
        yield found


def talk(address, *parts, read=True):
    """Sends bytes; returns the server's reply until it closes the connection."""
    with socket.create_connection(address, 240) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except OSError:  # it has ended
                break
        answer = b""
        while read:
            try:
                part = connection.recv(1 << 16)
            except ConnectionError:
                break
            if not part:
                break
            answer += part
    return answer


def wait_until_hung_up(app):
    """Waits until the server has closed its only connection."""
    deadline = time.monotonic() + 240
    while app.connections:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def request(*headers, close=True):
    lines = ["GET / HTTP/1.1", "host: h", *headers, *(["connection: close"] if close else [])]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_requests_within_the_limits_are_answered(server):
    address, app = server
    long = "x-long: " + "a" * (MAX_BYTES // 2)
    answer = talk(address, request(long, close=False) + request(close=False), request())
    assert answer.count(b"HTTP/1.1 200") == 3
    assert len(app.headers[0][b"x-long"]) == MAX_BYTES // 2
    many = [f"x-{number}: 1" for number in range(MAX_HEADERS - 2)]
    assert talk(address, request(*many)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("pieces", [1, 50])
def test_longer_headers_are_refused_before_they_have_all_come(server, pieces):
    address, app = server
    head = b"GET / HTTP/1.1\r\nhost: h\r\nx-long: " + b"a" * (2 * MAX_BYTES)
    size = len(head) // pieces + 1
    answer = talk(address, *(head[place : place + size] for place in range(0, len(head), size)))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")  # a reset may overtake it
    assert app.headers == []


@pytest.mark.parametrize("what", ["a long URL", "many headers"])
def test_other_ways_to_send_too_much_are_refused(server, what):
    address, app = server
    head = b"GET /" + b"a" * (2 * MAX_BYTES) + b" HTTP/1.1\r\n"
    if what == "many headers":
        head = request(*(f"x-{number}: 1" for number in range(MAX_HEADERS + 1)))
    answer = talk(address, head)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert app.headers == []


def test_a_body_may_be_longer_than_headers(server):
    address, _ = server
    size = 4 * MAX_BYTES
    head = request(f"content-length: {size}").replace(b"GET", b"POST")
    assert talk(address, head + b"b" * size).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost:"])
def test_headers_that_take_too_long_end_the_connection(monkeypatch, begun):
    monkeypatch.setattr(http_protocol, "HEADER_TIMEOUT_S", 0.2)
    with running() as (address, app):
        answer = talk(address, begun)
        assert answer.startswith(b"HTTP/1.1 408 ") if begun else answer == b""
        assert app.headers == []


def test_idle_connections_keep_nobody_out(server, monkeypatch):
    monkeypatch.setattr(http_protocol, "MAX_IDLE", 3)
    address, _ = server
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(6)]
        for _ in range(2):
            assert talk(address, b"GET / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        for connection in idle[:3]:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        idle[-1].sendall(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
        assert idle[-1].recv(100)


def test_a_body_that_goes_on_after_the_answer_ends_the_connection(monkeypatch):
    monkeypatch.setattr(http_protocol, "BODY_GRACE_S", 0.2)
    with running() as (address, _):
        head = request("content-length: 1000", close=False)
        answer = talk(address, head + b"b")
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"ok\r\n0\r\n\r\n")


def test_an_application_can_hang_up_on_a_client_that_does_not_read(server):
    address, app = server
    with socket.create_connection(address, 240) as connection:
        connection.sendall(request().replace(b"/ ", b"/hang-up "))
        assert connection.recv(1)
        wait_until_hung_up(app)
        last = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 20):
                last = (last + part)[-16:]
    assert not last.endswith(b"0\r\n\r\n")  # the end of a whole answer


@pytest.mark.parametrize("close", [True, False])
def test_a_client_that_takes_nothing_of_its_answer_is_hung_up_on(monkeypatch, close):
    """The application ended long before, with the whole answer at the server."""
    monkeypatch.setattr(http_protocol, "SEND_TIMEOUT_S", 0.2)
    asked = request(close=close).replace(b"/ ", b"/long ")
    with running() as (address, app):
        with socket.create_connection(address, 240) as connection:
            connection.sendall(asked)
            got = len(connection.recv(1))
            wait_until_hung_up(app)
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(1 << 20):
                    got += len(part)
        assert 0 < got < LONG
        monkeypatch.undo()  # this process may not run for as long
        assert len(talk(address, asked.replace(b"host: h", b"connection: close"))) > LONG


def test_it_is_what_uvicorn_takes_by_default():
    http_protocol.limit_connections()
    config = uvicorn.Config(App(), lifespan="off")
    config.load()
    assert config.http_protocol_class is LimitedHttp
