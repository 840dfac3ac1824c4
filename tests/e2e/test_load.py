# SPDX-License-Identifier: Apache-2.0
"""A real server with misbehaving clients: metrics, durations and leaks."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
from e2e import health_watch, recording_scheduler
from e2e.tenants import (
    identities,
    serve_tenants,
    wait_until_answers_are_kept,
    write_settings,
)
from e2e.traffic import CLIENT_SALTS, MARK, Clients, Planned, plan

from vllm_metal.serving.deadline import GRACE_S
from vllm_metal.settings import salts, secret_file

pytestmark = pytest.mark.more

NAMES = ("acme", "other", "third")
TIMEOUT_S, BODY_S, PATIENCE_S = 4, 2, 120
#: More than the buffers of two sockets take (some 4 MB, where the client's is made small).
MAX_ANSWER_BYTES = 8 * 10**6
#: Time for a slow or busy machine: tests assert that limits hold, not how long things take.
SLACK_S = 60.0
AT_ONCE = 16
#: Bounds of the second half over the first; stored responses, which vLLM never drops, fit in.
MORE_MEMORY, MORE_FILES = 1.1, 16
STATUSES = {200, 400, 401, 404, 408, 413, 504}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("load")


def settings_in(folder, limits):
    """Writes a server's settings; returns its tenants' keys."""
    keys = write_settings(folder, NAMES, limits)
    with (folder / "serving.toml").open("a") as settings:  # whose last section is the cache's
        settings.write(f"max_answer_bytes = {MAX_ANSWER_BYTES}\n")
    return keys


@pytest.fixture(scope="module")
def served(long_texts, folder):
    keys = settings_in(folder, f"timeout_s = {TIMEOUT_S}\nmax_body_s = {BODY_S}\n")
    options = ["--scheduler-cls", "e2e.recording_scheduler.RecordingScheduler"]
    recorded = {recording_scheduler.FILE: str(folder / "recorded")}
    recorded["PYTHONPATH"] = ":".join(path for path in sys.path if path)
    with serve_tenants(long_texts, folder, keys, "log", options, recorded) as running:
        wait_until_answers_are_kept(running)
        for path, fields in (
            ("/v1/completions", {"prompt": ["Once"] * AT_ONCE, "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Once"}]}),
        ):  # the first of a kind takes seconds, which is not what is tested
            running.ask("acme", path, **fields, max_tokens=8, temperature=1)
        yield running


@dataclass
class Footprints:
    """Sampled memory and open files of a server's processes."""

    process: int
    samples: list[tuple[int, int]] = field(default_factory=list)  # bytes, files
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self):
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _work(self):
        parent = psutil.Process(self.process)
        while not self._ended.wait(0.5):
            all_of_them = [parent, *parent.children(recursive=True)]
            memory = sum(process.memory_info().rss for process in all_of_them)
            self.samples.append((memory, sum(process.num_fds() for process in all_of_them)))

    def halves(self):
        """Returns the maximum (memory, files) in each half."""
        middle = len(self.samples) // 2
        return [
            tuple(max(each) for each in zip(*part, strict=True))
            for part in (self.samples[:middle], self.samples[middle:])
        ]


def counted(served):
    """Returns the server's counts of prompt and output tokens by tenant."""
    return {
        name: tuple(
            int(served.metric("vllm:tenant_tokens_total", tenant=name, kind=kind))
            for kind in ("prompt", "completion")
        )
        for name in NAMES
    }


def generated(folder):
    """Returns the same counts as recorded by the engine."""
    secret = secret_file.read(folder / "secret", "secret")
    found = recording_scheduler.read(folder / "recorded")
    sums, who = {}, identities(folder)
    for name in NAMES:
        of_tenant = [
            found.pop(salts.derive(secret, who[name], salt), (0, 0)) for salt in CLIENT_SALTS
        ]
        sums[name] = tuple(sum(each) for each in zip(*of_tenant, strict=True))
    assert found == {}  # nobody's
    return sums


def wait_until_idle(served, folder):
    """Waits for background requests and late steps after the last client has left."""
    deadline = time.monotonic() + 240
    before = None
    while before != (now := (generated(folder), served.metric("vllm:num_requests_running"))) or (
        now[1] or served.metric("vllm:num_requests_waiting")
    ):
        assert time.monotonic() < deadline, now
        before = now
        time.sleep(1)


def hidden(keys, folder):
    """Returns texts that must not appear in a log."""
    secret = secret_file.read(folder / "secret", "secret")
    made = {salts.derive(secret, name, salt) for name in NAMES for salt in CLIENT_SALTS}
    return [*keys.values(), *made, secret.decode(), MARK, CLIENT_SALTS[1]]


def check(served, folder, number, seed):
    """Sends requests and checks everything; returns their results."""
    before = served.metric("vllm:generation_tokens_total")
    recorded = sum(answer for _, answer in generated(folder).values())
    clients = Clients(served.server.url, served.keys)
    with (
        Footprints(served.server.process.pid) as prints,
        health_watch.watching(served.server.url) as health,
    ):
        started = time.monotonic()
        asyncio.run(clients.run(plan(number, NAMES, seed), AT_ONCE))
        took = time.monotonic() - started
    wait_until_idle(served, folder)
    sums = generated(folder)
    statuses = Counter(seen.status for seen in clients.seen)
    waited = max(seen.seconds for seen in clients.seen if seen.status is not None)
    by_vllm = served.metric("vllm:generation_tokens_total") - before
    by_engine = sum(answer for _, answer in sums.values()) - recorded
    (memory, files), (memory_after, files_after) = prints.halves()
    print(
        f"\n{number} requests in {took:.0f} s: {dict(statuses)}; timeouts "
        f"{served.metric('vllm:request_timeouts_total'):.0f}, hits "
        f"{served.metric('vllm:response_cache_requests_total', result='hit'):.0f}\n"
        f"tokens by tenant (prompts, answers): engine {sums}, counted {counted(served)}; in all "
        f"{by_engine}, of which vLLM's own counter has {by_vllm:.0f}\n"
        f"longest wait {waited:.2f} s; /health {health[0]} times, worst {health[1]:.3f} s\n"
        f"memory {memory / 1e6:.0f} -> {memory_after / 1e6:.0f} MB, files {files} -> {files_after}"
    )
    assert counted(served) == sums
    assert by_vllm <= by_engine  # it leaves out late steps of aborted requests
    unexpected = [one for one in clients.seen if one.status not in {None, *STATUSES}]
    assert unexpected == []
    assert waited < TIMEOUT_S + GRACE_S + 1 + SLACK_S
    assert health[1] < SLACK_S
    log = served.server.log.read_text()
    assert [word for word in hidden(served.keys, folder) if word in log] == []
    return clients.seen, prints


USER = {"role": "user", "content": "a"}
#: A path, a body, and the setting that its refusal names; None: vLLM refuses it.
HOSTILE = {
    "objects": ("chat/completions", '{"a":[' + "{}," * 2_600_000 + "{}]}", "max_body_values"),
    "messages": ("chat/completions", {"messages": [USER] * 200_000}, "max_body_names"),
    "fewer messages": ("chat/completions", {"messages": [USER] * 20_000}, "max_body_items"),
    "nested": ("chat/completions", '{"a":' + "[" * 100 + "]" * 100 + "}", "max_body_depth"),
    "choices": ("completions", {"prompt": ["a"] * 1000, "n": 100}, "max_body_choices"),
    "mistakes": ("responses", {"input": [{}] * 9000}, None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_would_stop_the_server_is_refused(served, name):
    route, made, setting = HOSTILE[name]
    body = made if isinstance(made, str) else json.dumps({"model": "m", **made})
    headers = {"Content-Type": "application/json"}
    path = f"/v1/{route}"
    reply = served.send("POST", path, served.keys["acme"], content=body, headers=headers)
    assert reply.status_code == 400
    if (
        setting is None
    ):  # vLLM looked no further than the first: it has some 230 things to say of it
        assert int(reply.json()["error"]["message"].split()[0]) < 1000
    else:
        assert setting in reply.json()["error"]["message"]


def test_a_body_that_never_ends_is_refused(served):
    body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 1}).encode()
    one = Planned("acme", "/v1/completions", body, "never ends its body")
    clients = Clients(served.server.url, served.keys)
    asyncio.run(clients.run(iter([[one] * 50]), 1))
    assert {seen.status for seen in clients.seen} == {408}


def test_the_name_of_a_clients_tool_is_not_logged(served):
    function = {"name": MARK, "arguments": "{"}
    call = {"id": "x", "type": "function", "function": function}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}]
    reply = served.ask("acme", "/v1/chat/completions", messages=messages, max_tokens=1)
    log = served.server.log.read_text()
    assert reply.status_code == 200
    assert "has arguments that are not valid" in log and MARK not in log


@contextmanager
def unread(served, tenant, path, fields):
    """Returns the socket of a client that sent a request and reads nothing."""
    url, body = httpx.URL(served.server.url), json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {served.keys[tenant]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        client.sendall(head.encode() + body)
        yield client


@pytest.mark.slow
def test_a_client_that_does_not_read_holds_no_twin_up(long_texts, tmp_path):
    """Its stream is longer than two sockets' buffers and short enough to be kept."""
    text = "=" * 60_000  # 64 of them are a token
    fields = {"prompt": text, "max_tokens": 1, "echo": True, "n": 100, "stream": True}
    fields |= {"model": "m", "seed": 5}
    kept = "vllm:response_cache_requests_total"
    # A time limit that a slow machine keeps as well: the answer takes seconds.
    keys = settings_in(tmp_path, f"timeout_s = {PATIENCE_S}\n")
    with serve_tenants(long_texts, tmp_path, keys, "log") as served:
        wait_until_answers_are_kept(served)
        before = served.metric(kept, result="miss")
        with unread(served, "acme", "/v1/completions", fields) as first:
            while served.metric(kept, result="miss") == before:
                time.sleep(0.01)
            second = served.send("POST", "/v1/completions", served.keys["acme"], json=fields)
            assert first.recv(1)  # the first one is still there, and had read nothing
    assert (second.status_code, second.headers["x-cache"]) == (200, "HIT")
    assert "[DONE]" in second.text and len(second.text) > 100 * len(text)


def test_60_requests_of_clients_that_misbehave(served, folder):
    seen, _ = check(served, folder, 60, seed=1)
    assert {200, 400, None} <= {one.status for one in seen}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10000_requests_of_clients_that_misbehave(served, folder):
    check(served, folder, 500, seed=2)  # caches fill, and allocators find their size
    seen, prints = check(served, folder, 10_000, seed=3)
    assert {one.status for one in seen} >= {200, 400, 401, 408, 504, None}
    (memory, files), (memory_after, files_after) = prints.halves()
    assert memory_after < MORE_MEMORY * memory
    assert files_after < files + MORE_FILES
