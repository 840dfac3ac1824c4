# SPDX-License-Identifier: Apache-2.0
"""A Prometheus on a server: all queries of deploy/ find something, and every alert fires.

The server has tenants and a response cache, drafts that are mostly wrong, prompts that are all
different, and more requests than it can compute; and one of its steps fails.
"""

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from deploy.queries import panel_queries, rules
from deploy.running import PROGRAM, prometheus
from e2e.fuzz.models import VOCAB, write_models
from e2e.server import serve
from openai import InternalServerError

from vllm_metal.serving import tenants_file

pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(
        PROGRAM is None, reason="prometheus is not installed (Debian: apt-get install prometheus)"
    ),
]

#: One request has 15 or 16 blocks, and they are all; vLLM keeps one more for itself.
PROMPT, NUM_TOKENS, BLOCKS = 226, 12, 17
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
OPTIONS = (
    *("--served-model-name", "tiny"),
    *("--middleware", "vllm_metal.serving.Tenants"),
    *("--max-model-len", "256"),
    *("--max-num-seqs", "4"),
    *("--num-gpu-blocks-override", str(BLOCKS)),
    *("--speculative-config", json.dumps(SPECULATION)),
    *("--additional-config", '{"fixed_draft_length": true}'),
)
SETTINGS = """
[tenants]
keys = "tenants.json"
secret = "secret"
metrics = "open"
[response_cache]
path = "answers"
"""
AT_ONCE, CALLERS = 40, 5
MISSES = 300  # three times what the alert waits for: some may come before the first scrape
DEADLINE = 120.0


@pytest.fixture(scope="module")
def failing_file(tmp_path_factory):
    """Once it is there, the server's next step fails."""
    return tmp_path_factory.mktemp("failing") / "now"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def key(folder):
    """Of the only tenant."""
    (folder / "serving.toml").write_text(SETTINGS)
    (folder / "secret").write_text("a secret of a server in a test")
    (folder / "secret").chmod(0o600)
    return tenants_file.add(folder / "tenants.json", "acme")[1]


@pytest.fixture(scope="module")
def server(folder, key, failing_file):
    write_models(folder)
    first = str(Path(__file__).parent / "failing")
    environment = {
        "PYTHONPATH": os.pathsep.join([first, os.environ.get("PYTHONPATH", "")]),
        "VLLM_METAL_TEST_FAIL": str(failing_file),
        "VLLM_METAL_SERVING_CONFIG": str(folder / "serving.toml"),
        "VLLM_LOG_STATS_INTERVAL": "1",
    }
    with serve(str(folder / "full"), OPTIONS, folder / "log", environment=environment) as started:
        yield started


@pytest.fixture(scope="module")
def watched(server, tmp_path_factory):
    targets = [server.url.removeprefix("http://")]
    with prometheus(targets, tmp_path_factory.mktemp("prometheus")) as started:
        yield started


def client(server, key):
    return server.client().with_options(api_key=key)


def send(server, key, seed, stop):
    """Requests without end, each with a prompt of its own and tokens nobody can guess."""
    random = np.random.default_rng(seed)
    with client(server, key) as asking:
        while not stop.is_set():
            with suppress(InternalServerError):  # of the requests whose step fails
                asking.completions.create(
                    model="tiny",
                    prompt=random.integers(2, VOCAB, (AT_ONCE, PROMPT)).tolist(),
                    temperature=2,
                    max_tokens=NUM_TOKENS,
                    extra_body={"ignore_eos": True},
                )


def wait_for(condition, what):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


def test_nothing_fires_before_there_is_traffic(watched):
    wait_for(lambda: watched.values("vllm:num_requests_waiting") == [0.0], watched.alerts)
    time.sleep(3)  # three times what an alert waits here
    assert watched.alerts() == set()


def miss(server, key):
    """Asks for what the response cache could answer, if it had been asked before."""
    with client(server, key) as asking:
        for number in range(MISSES):
            asking.completions.create(
                model="tiny",
                prompt=[2 + digit for digit in divmod(number, VOCAB - 2)],
                temperature=0,
                max_tokens=1,
            )


def test_every_alert_fires(watched, server, key, failing_file):
    expected = {(rule["alert"], "firing") for rule in rules("alert")}
    stop, fired = threading.Event(), set()
    miss(server, key)
    senders = [
        threading.Thread(target=send, args=(server, key, seed, stop), daemon=True)
        for seed in range(CALLERS)
    ]
    for sender in senders:
        sender.start()
    try:
        wait_for(lambda: watched.values("vllm:num_requests_waiting") > [50.0], watched.alerts)
        failing_file.touch()
        while_it_lasts = time.monotonic() + DEADLINE
        while fired < expected and time.monotonic() < while_it_lasts:
            time.sleep(0.5)
            fired |= watched.alerts() & expected
    finally:
        stop.set()
    assert fired == expected
    assert not failing_file.exists()
    for sender in senders:
        sender.join(DEADLINE)


@pytest.mark.parametrize("query", [rule["expr"] for rule in rules("record")])
def test_every_recording_rule_finds_something(watched, query):
    assert watched.values(query)


@pytest.mark.parametrize(("title", "query"), list(panel_queries()))
def test_every_panel_finds_something(watched, title, query):
    assert watched.values(query)


def test_acceptance_and_hit_rate_are_in_one_scrape_and_in_one_line(server):
    for of in ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"):
        assert server.metric(f"vllm:{of}_total") > 0
    assert server.metric("vllm:prefix_cache_queries_total") > 0
    assert server.metric("vllm:metal_failed_steps_total") == 1
    assert server.metric("vllm:response_cache_requests_total", result="miss") == MISSES
    assert server.metric("vllm:tenant_requests_total", tenant="acme", status="200") >= MISSES
    assert any(
        "Prefix cache hit rate: " in line and "Draft acceptance rate: " in line
        for line in server.log.read_text().splitlines()
    )
