# SPDX-License-Identifier: Apache-2.0
"""Prometheus with a real server: all queries of deploy/ have results, every alert fires.

The server has tenants and a response cache, drafts that are mostly wrong, prompts that are all
different, and more requests than it can compute in time; somebody has no key, one of its steps
fails, and in the end its engine is killed.
"""

import json
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from deploy.queries import panel_queries, rules, write_logging
from deploy.running import PROGRAM, prometheus
from e2e.fuzz.models import VOCAB, write_models
from e2e.server import serve
from openai import AuthenticationError, InternalServerError

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
timeout_s = 8
[tenants]
keys = "tenants.json"
secret = "secret"
[response_cache]
path = "answers"
"""
AT_ONCE, CALLERS = 60, 5
TOKENS = "vllm:tenant_tokens_total"
REFUSED = 25  # the alert waits for more than 20
MISSES = 300  # three times what the alert waits for: some may come before the first scrape
DEADLINE = 120.0


@pytest.fixture(scope="module")
def failing_file(tmp_path_factory):
    """File whose existence makes the server's next step fail."""
    return tmp_path_factory.mktemp("failing") / "now"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def keys(folder):
    """Returns the keys of the only tenant and of /metrics."""
    (folder / "serving.toml").write_text(SETTINGS)
    (folder / "secret").write_text("a secret of a server in a test")
    (folder / "secret").chmod(0o600)
    file = folder / "tenants.json"
    tenant = tenants_file.add(file, "acme")[1]
    return {"acme": tenant, "metrics": tenants_file.add(file, "prom", "metrics")[1]}


@pytest.fixture(scope="module")
def key(keys):
    return keys["acme"]


@pytest.fixture(scope="module")
def start(folder, keys, failing_file):
    """Starts the server on a given or free port."""
    write_models(folder)
    first = str(Path(__file__).parent / "failing")
    environment = {
        "PYTHONPATH": os.pathsep.join([first, os.environ.get("PYTHONPATH", "")]),
        "VLLM_METAL_TEST_FAIL": str(failing_file),
        "VLLM_METAL_SERVING_CONFIG": str(folder / "serving.toml"),
        "VLLM_LOG_STATS_INTERVAL": "1",
        "VLLM_LOGGING_CONFIG_PATH": str(write_logging(folder, folder / "server.log")),
    }

    @contextmanager
    def started(log, port=None):
        with serve(str(folder / "full"), OPTIONS, log, port, environment) as found:
            yield replace(found, metrics_key=keys["metrics"])

    return started


@pytest.fixture(scope="module")
def server(start, folder):
    with start(folder / "log") as found:
        yield found


@pytest.fixture(scope="module")
def watched(server, keys, tmp_path_factory):
    """A running Prometheus, with a key in the configured file."""
    targets = [server.url.removeprefix("http://")]
    with prometheus(targets, tmp_path_factory.mktemp("prometheus"), keys["metrics"]) as started:
        yield started


def client(server, key):
    return server.client().with_options(api_key=key)


def send(server, key, seed, stop):
    """Sends endless requests with new prompts and unpredictable tokens."""
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


def engine_of(server):
    """Returns the engine's process."""
    (engine,) = (
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if "EngineCore" in " ".join(child.cmdline())
    )
    return engine


def wait_for(condition, what):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.5)


def test_nothing_fires_before_there_is_traffic(watched):
    wait_for(lambda: watched.values("vllm:num_requests_waiting") == [0.0], watched.alerts)
    time.sleep(3)  # three times what an alert waits here
    assert watched.alerts() == set()


def send_one(server, key):
    with client(server, key) as asking:
        asking.completions.create(model="tiny", prompt=[3, 4, 5], max_tokens=NUM_TOKENS)


def test_a_target_whose_key_is_missing_is_told(server, tmp_path):
    """Uses the shipped configuration, which has no key yet."""
    with prometheus([server.url.removeprefix("http://")], tmp_path, health="down") as started:
        wait_for(lambda: ("ServerDown", "firing") in started.alerts(), started.alerts)
        assert started.values("vllm:num_requests_waiting") == []


def miss(server, key):
    """Sends a new request that the response cache could store."""
    with client(server, key) as asking:
        for number in range(MISSES):
            asking.completions.create(
                model="tiny",
                prompt=[2 + digit for digit in divmod(number, VOCAB - 2)],
                temperature=0,
                max_tokens=1,
            )


def come_without_a_key(server):
    with client(server, "of nobody") as asking:
        for _ in range(REFUSED):
            with pytest.raises(AuthenticationError):
                asking.models.list()


def test_every_alert_fires(watched, server, key, failing_file):
    """Leaves out the alerts of a server that has ended, which a later test checks."""
    expected = {(rule["alert"], "firing") for rule in rules("alert")}
    expected -= {("ServerDown", "firing"), ("ServerRestarted", "firing")}
    stop, fired = threading.Event(), set()
    come_without_a_key(server)
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


def test_acceptance_and_hit_rate_are_in_one_scrape_and_in_one_line(server, key, folder):
    with client(server, key) as asking:  # a greedy text of a tiny model soon repeats itself
        asking.completions.create(
            model="tiny",
            prompt=[3, 4, 5],
            temperature=0,
            max_tokens=200,
            extra_body={"ignore_eos": True},
        )
    for of in ("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"):
        assert server.metric(f"vllm:{of}_total") > 0
    assert server.metric("vllm:prefix_cache_queries_total") > 0
    assert server.metric("vllm:metal_failed_steps_total") == 1
    assert server.metric("vllm:response_cache_requests_total", result="miss") == MISSES + 1
    assert server.metric("vllm:tenant_requests_total", tenant="acme", status="200") >= MISSES
    assert any(
        "Prefix cache hit rate: " in line and "Draft acceptance rate: " in line
        for line in (folder / "server.log").read_text().splitlines()
    )


def test_its_log_may_be_renamed(server, key, folder):
    """Later lines of the server's and the engine's processes go to a new file."""
    log, engine = folder / "server.log", engine_of(server)
    before = log.rename(folder / "server.log.0")
    send_one(server, key)
    wait_for(lambda: log.exists() and "Mean device time" in log.read_text(), log.exists)
    pids = {
        pid for pid in (server.process.pid, engine.pid) if f" {pid} INFO " in before.read_text()
    }
    assert pids == {server.process.pid, engine.pid}


def test_device_time_adds_up_and_tenants_pay_for_it(watched, server):
    """One tenant made all requests, so the device's cost is that tenant's cost."""
    by_kind = {
        kind: server.metric("vllm:metal_device_seconds_total", kind=kind)
        for kind in ("prefill", "decode")
    }
    assert min(by_kind.values()) > 0
    assert sum(by_kind.values()) == pytest.approx(
        server.metric("vllm:metal_step_device_seconds_sum")
    )
    for kind in ("prefill", "decode"):
        (price,) = watched.values(f'llm_cost_per_million_tokens{{kind="{kind}"}}')
        (paid,) = watched.values(f'llm_tenant_cost_per_hour{{kind="{kind}"}}')
        assert price > 0 and paid > 0
    assert server.metric("vllm:request_duration_seconds_count", outcome="timed_out") > 0
    found = {kind: server.metric(TOKENS, kind=kind) for kind in ("prompt", "cached", "completion")}
    # Steps that were under way when a request was aborted are the tenant's, and not in vLLM's sums.
    answers = server.metric("vllm:generation_tokens_total")
    assert answers <= found["completion"] <= 1.1 * answers
    computed = server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert found["prompt"] - found["cached"] == pytest.approx(computed, rel=0.1)


@pytest.mark.slow
def test_an_engine_that_is_killed_is_told_and_so_is_a_server_that_is_back(
    watched, server, start, folder
):
    engine_of(server).send_signal(signal.SIGKILL)
    assert server.process.wait(DEADLINE) is not None
    wait_for(lambda: ("ServerDown", "firing") in watched.alerts(), watched.alerts)
    assert ("ServerRestarted", "firing") not in watched.alerts()
    with start(folder / "second log", urlsplit(server.url).port):
        wait_for(lambda: ("ServerRestarted", "firing") in watched.alerts(), watched.alerts)
        wait_for(lambda: watched.up() == ["up"], watched.up)
