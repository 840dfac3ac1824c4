# SPDX-License-Identifier: Apache-2.0
"""The doctor with failing servers; a real one is in test_run."""

import re

import pytest
from cli.doctor.conftest import ignore

from vllm_metal.cli.doctor import server
from vllm_metal.cli.doctor.model import Model
from vllm_metal.device.child import LIMITS

SOME = Model("some", "/nowhere", local=True)
#: The part of an OpenAI server that the doctor reads.
SERVER = """
import json, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKENS, METRIC, STATUS, LAST, AT_CTRL_C = 10, 10, 200, "data: [DONE]", lambda: sys.exit(0)
CHANGES

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args): pass

    def reply(self, text, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        metric = f'vllm:generation_tokens_total{{engine="0"}} {METRIC}.0'
        self.reply({"/health": "", "/metrics": metric}[self.path])

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream"] and asked["max_tokens"] == 10
        if STATUS != 200:
            return self.reply("no chat today", STATUS)
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": TOKENS}})
        self.reply(f"data: {usage}\\n\\n{LAST}\\n\\n")

port = int(sys.argv[sys.argv.index("--port") + 1])
made = ThreadingHTTPServer(("127.0.0.1", port), Handler)
signal.signal(signal.SIGINT, lambda *args: AT_CTRL_C())
made.serve_forever()
"""


def found_of(script, changes: str, limits=LIMITS):
    command = script(SERVER.replace("CHANGES", changes))
    return server.try_server(SOME, True, ignore, command, limits, idle_seconds=0.1)


@pytest.mark.parametrize(
    "changes, seen",
    [
        ("raise RuntimeError('no memory')", "while loading the model: RuntimeError: no memory"),
        ("sys.exit(0)", "ended by itself with exit status 0 while loading the model"),
        ("STATUS = 500", "HTTP status 500: no chat today"),
        ("TOKENS = 9", "after 9 tokens of 10"),
        ('LAST = \'data: {"error": "it broke"}\'', "an error in the stream: it broke"),
        ("METRIC = 3", "/metrics says vllm:generation_tokens_total 3"),
        ("AT_CTRL_C = lambda: sys.exit(3)", "exit status 3 while shutting down"),
        ("AT_CTRL_C = lambda: None", "hung while shutting down"),
        ("import os; AT_CTRL_C = os.abort", "signal 6 (SIGABRT) while shutting down"),
    ],
)
def test_whatever_goes_wrong_is_a_failure_that_is_named(script, changes, seen):
    limits = {**LIMITS, "shutting down": 1.0} if "hung" in seen else LIMITS
    found = found_of(script, changes, limits)
    assert found.status == "failed"
    assert seen in found.seen
    assert found.advice


def test_nothing_wrong_is_found_in_the_double(script, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which nobody is to ask
    found = found_of(script, "")
    assert found.status == "ok", (found.seen, *found.log)
    assert "exit status 0" in found.seen
    assert re.search(r"asked again: \d+\.\d+, ", found.seen) and "after 0.1 s idle" in found.seen
