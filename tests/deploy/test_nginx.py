# SPDX-License-Identifier: Apache-2.0
"""nginx with the shipped configuration limits clients and passes streams on."""

import json
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest
from deploy.proxied import CONFIGURATION, EVENTS, PROGRAM, double, nginx

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"
)
CHAT, BURST, AT_ONCE = "/v1/chat/completions", 20, 8
STYLES = (lambda key: {"Authorization": f"Bearer {key}"}, lambda key: {"x-api-key": key})


@pytest.fixture
def server():
    with double() as running:
        yield running


@pytest.fixture
def proxy(server, tmp_path):
    with nginx([server.address], tmp_path) as url, httpx.Client(base_url=url) as client:
        yield client


def ask(proxy, headers, **fields):
    return proxy.post(CHAT, json={"model": "m"} | fields, headers=headers)


@pytest.mark.parametrize("style", [STYLES[0], pytest.param(STYLES[1], marks=pytest.mark.more)])
def test_a_key_that_asks_too_often_is_told_when_to_come_again(proxy, server, style):
    replies = []
    while not replies or replies[-1].status_code == 200:
        assert len(replies) < 2000
        replies.append(ask(proxy, style("eager")))
    assert len(replies) > 1 + BURST
    refused = replies[-1]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == 429
    assert ask(proxy, style("another")).status_code == 200
    assert len(server.seen) == len(replies)  # all but the one that was refused, and another's


@pytest.mark.more
def test_keys_that_change_are_limited_by_their_address(server, tmp_path):
    """Lowers the rate so that even a busy machine exceeds it."""
    with (
        nginx([server.address], tmp_path, {"rate=50r/s": "rate=1r/s"}) as url,
        httpx.Client(base_url=url) as proxy,
    ):
        for number in range(1000):
            if ask(proxy, STYLES[0](f"tried-{number}")).status_code == 429:
                break
    assert 200 < number < 999


@pytest.mark.parametrize("chunked", [True, pytest.param(False, marks=pytest.mark.more)])
def test_a_stream_is_not_held_back(proxy, server, chunked):
    """The server sends the second event only after the first was seen."""
    server.chunked = chunked
    with proxy.stream("POST", CHAT, json={"stream": True}) as reply:
        parts = reply.iter_raw()
        assert next(parts) == EVENTS[0]
        server.go_on.set()
        assert b"".join(parts) == b"".join(EVENTS[1:])


def test_so_many_at_a_time_of_one_key(proxy, server):
    with ExitStack() as stack:

        def begin(key):
            asked = proxy.stream("POST", CHAT, json={"stream": True}, headers=STYLES[0](key))
            return stack.enter_context(asked)

        begun = [begin("many") for _ in range(AT_ONCE)]
        assert {reply.status_code for reply in begun} == {200}
        assert begin("many").status_code == 429
        assert begin("another").status_code == 200
        server.go_on.set()


def test_a_body_that_is_too_large(proxy, server):
    reply = ask(proxy, STYLES[0]("a"), prompt="x" * (8 << 20))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, 413)
    assert server.seen == []


def test_a_large_body_arrives_and_is_written_to_no_file(proxy, server, tmp_path):
    assert ask(proxy, STYLES[0]("a"), prompt="x" * (7 << 20)).status_code == 200
    assert len(server.seen) == 1
    assert "temporary file" not in (tmp_path / "error.log").read_text()


@pytest.mark.parametrize("headers", [{"x": "y" * 9000}, {f"x-{n}": "y" * 4000 for n in range(9)}])
def test_headers_that_are_too_large(proxy, server, headers):
    assert proxy.post(CHAT, json={}, headers=headers).status_code in (400, 494)
    assert server.seen == []


@pytest.mark.parametrize(
    ("directive", "sent"),
    [
        (
            "client_header_timeout       10s",
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nX-Slow: ",
        ),
        (
            "client_body_timeout     10s",
            b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{",
        ),
    ],
)
def test_a_request_that_does_not_arrive_is_let_go(server, tmp_path, directive, sent):
    """Uses one second instead of the shipped ten."""
    changes = {directive: directive.replace("10s", "1s")}
    with nginx([server.address], tmp_path, changes) as url:
        where = urlsplit(url)
        with socket.create_connection((where.hostname, where.port), 30) as connection:
            connection.sendall(sent)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer == b"" or b" 408 " in answer.splitlines()[0]
    assert server.seen == []


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/metrics", 404), ("/docs", 404)])
def test_other_routes(proxy, path, status):
    assert proxy.get(path).status_code == status


@pytest.mark.parametrize("trouble", ["draining", pytest.param("dying", marks=pytest.mark.more)])
def test_a_key_stays_with_its_server_while_that_takes_requests(tmp_path, trouble):
    with (
        double() as one,
        double() as other,
        nginx([one.address, other.address], tmp_path) as url,
        httpx.Client(base_url=url) as proxy,
    ):
        keys = [f"key-{number}" for number in range(24)]
        home = {key: ask(proxy, STYLES[0](key)).json()["port"] for key in keys}
        assert len(set(home.values())) == 2
        for key in reversed(keys):
            assert ask(proxy, STYLES[0](key)).json()["port"] == home[key]
        setattr(one, trouble, True)
        for key in keys:
            reply = ask(proxy, STYLES[0](key))
            assert (reply.status_code, reply.json()["port"]) == (200, other.server_address[1])


def test_servers_that_all_refuse(tmp_path):
    """nginx passes on their own answer."""
    with double() as server, nginx([server.address], tmp_path) as url:
        server.draining = True
        reply = httpx.post(f"{url}{CHAT}", json={})
    assert (reply.status_code, reply.json()) == (503, {"error": "draining"})


def test_a_server_that_is_away(tmp_path):
    with double() as gone:
        away = gone.address
    with (
        double() as there,
        nginx([away, there.address], tmp_path) as url,
        httpx.Client(base_url=url) as proxy,
    ):
        for number in range(24):
            assert ask(proxy, STYLES[0](f"key-{number}")).status_code == 200


def test_no_server_at_all(tmp_path):
    with double() as gone:
        away = gone.address
    with nginx([away], tmp_path) as url:
        reply = httpx.post(f"{url}{CHAT}", json={})
    assert (reply.status_code, reply.headers["retry-after"]) == (502, "5")
    assert reply.json()["error"]["code"] == 502


def test_logs_have_no_key_and_no_prompt(proxy, tmp_path):
    for _ in range(2 * BURST):
        ask(proxy, STYLES[0]("secret-key"), prompt="secret-prompt")
    logs = "".join((tmp_path / name).read_text() for name in ("access.log", "error.log"))
    assert CHAT in logs and "secret" not in logs


def test_its_size_is_the_servers():
    from vllm_metal.serving.config import BodyLimits

    text = CONFIGURATION.read_text()
    assert f"client_max_body_size    {round(BodyLimits().max_body_bytes / 10**6)}m;" in text
    assert json.loads(text.split("return 429 '")[1].split("';")[0])["error"]["code"] == 429
