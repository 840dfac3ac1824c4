# SPDX-License-Identifier: Apache-2.0
"""The page's own server: access, and errors of the model's server."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from starlette.testclient import TestClient

from vllm_metal.cli.chat import page
from vllm_metal.cli.chat.upstream import Upstream

KEY = "a-secret-key"
REFUSAL = {"error": {"message": "the prompt is too long", "type": "BadRequestError"}}
ASKED = {"messages": [{"role": "user", "content": "hi"}]}


class Double(BaseHTTPRequestHandler):
    """A server that lists a model to holders of its key, and rejects every question."""

    def do_GET(self):
        known = self.headers["Authorization"] == f"Bearer {KEY}"
        models = {"data": [{"id": "m", "max_model_len": 64}]}
        self._send(200 if known else 401, models if known else {"error": "Unauthorized"})

    def do_POST(self):
        self._send(400, REFUSAL)

    def _send(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Double) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def client(url, key=KEY, host="127.0.0.1", token="t"):
    asked = TestClient(page.app(Upstream(url, key), "t"), base_url=f"http://{host}:8090")
    asked.get("/", params={"token": token})
    return asked


def test_whoever_has_not_the_pages_address_gets_nothing(url):
    """Other users of the machine would get answers with the user's key."""
    for token in ("", "T", "tt", "é"):
        asked = client(url, token=token)
        for path in ("/", "/main.js", "/api/model", "/?token=x", "/main.js?token=t"):
            assert asked.get(path).status_code == 401
        reply = asked.post("/api/answer", json=ASKED)
        assert reply.status_code == 401 and "has printed" in reply.json()["error"]
    known = client(url)
    (cookie,) = known.cookies.jar
    assert cookie.has_nonstandard_attr("HttpOnly") and cookie.name.endswith("8090")
    assert known.get("/").status_code == 200


def test_the_page_may_load_nothing_from_elsewhere_and_has_no_key(url):
    asked = client(url)
    for path in ("/", "/main.js", "/api/model"):
        reply = asked.get(path)
        assert reply.status_code == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert KEY not in reply.text


def test_the_model_is_asked_with_the_key(url):
    assert client(f"{url}/v1/").get("/api/model").json() == {
        **{"name": "m", "label": "m", "context": 64},
        **{"millions": None, "max_tokens": None},
    }


def test_a_wrong_key_is_named_with_what_to_do(url):
    reply = client(url, key=None).get("/api/model")
    assert reply.status_code == 502
    assert "401" in reply.json()["error"] and "VLLM_API_KEY" in reply.json()["error"]


def test_another_name_for_this_machine_is_refused(url):
    assert client(url, host="attacker.example").get("/api/model").status_code == 400


def test_a_form_of_another_page_is_refused(url):
    body = json.dumps(ASKED)
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        reply = client(url).post("/api/answer", content=body, headers={"Content-Type": kind})
        assert reply.status_code == 415


def test_a_server_s_refusal_reaches_the_user(url):
    reply = client(url).post("/api/answer", json=ASKED)
    (event,) = map(json.loads, reply.text.splitlines())
    assert event["error"] == "The server says 400: the prompt is too long"


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        reply = client(url).get("/api/metrics")
    assert reply.status_code == 502 and f"{url} does not answer" in reply.json()["error"]


@pytest.mark.parametrize("url", ["foo", "ftp://127.0.0.1:1", "http://[", "http://127.0.0.1:x"])
def test_what_is_no_address_is_named_with_one_that_is(url):
    with pytest.raises(ValueError, match=r"is not the address of a server: write --url http://"):
        Upstream(url, None)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("[]", "JSON object"),
        ('{"messages": 3}', "messages must be a list"),
        ('{"texts": [1]}', "texts must be a list of strings"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "half of a surrogate pair"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "sampling": {"stop": ["\\udfff"]}}',
            "half of a surrogate pair",
        ),
        pytest.param("[" * 100_000, "nested too deeply", id="nested"),
    ],
)
def test_nonsense_is_refused_by_name(url, asked, said):
    path = "/api/markdown" if "texts" in asked else "/api/answer"
    reply = client(url).post(path, content=asked, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and said in reply.json()["error"]


def test_kept_answers_become_blocks(url):
    reply = client(url).post("/api/markdown", json={"texts": ["a\n\nb", ""]})
    assert reply.json() == [["<p>a</p>\n", "<p>b</p>\n"], []]
