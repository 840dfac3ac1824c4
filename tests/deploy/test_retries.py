# SPDX-License-Identifier: Apache-2.0
"""Clients retry as docs/several-servers.md says."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic
import openai
import pytest
from deploy.queries import DEPLOY

PAGE = (DEPLOY.parent / "docs" / "several-servers.md").read_text()
ROWS = re.findall(r"^\| ([\d, ]+) \| [\w, ]+ \| (yes|no) \|", PAGE, re.MULTILINE)
STATUSES = [(int(status), told == "yes") for cell, told in ROWS for status in cell.split(", ")]
TRIES = 3  # one, and two more


class Refusing(ThreadingHTTPServer):
    """Answers with one status, and counts requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.asked = 500, 0


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked += 1
        self.send_response(self.server.status)
        self.send_header("retry-after-ms", "1")
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no", "type": "no"}}')

    def log_message(self, *args):
        return


@pytest.fixture(scope="module")
def server():
    with Refusing() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def by_openai(url):
    with openai.OpenAI(base_url=url, api_key="k") as client:
        client.completions.create(model="m", prompt="a")


def by_anthropic(url):
    with anthropic.Anthropic(base_url=url, api_key="k") as client:
        said = [{"role": "user", "content": "a"}]
        client.messages.create(model="m", max_tokens=1, messages=said)


@pytest.mark.parametrize("ask", [by_openai, pytest.param(by_anthropic, marks=pytest.mark.more)])
@pytest.mark.parametrize(("status", "again"), STATUSES)
def test_which_statuses_are_tried_again(server, ask, status, again):
    server.status, server.asked = status, 0
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)):
        ask(f"http://127.0.0.1:{server.server_address[1]}")
    assert server.asked == (TRIES if again else 1)


def test_the_page_has_the_statuses_that_there_are():
    assert {status for status, _ in STATUSES} >= {400, 401, 404, 413, 429, 500, 502, 503, 504}


@pytest.mark.parametrize("client", [openai, anthropic])
def test_the_defaults_that_the_page_names(client):
    assert client.DEFAULT_MAX_RETRIES == 2 and "twice by default" in PAGE
    assert client.DEFAULT_TIMEOUT.read == 600 and "timeout of 10 minutes" in PAGE
