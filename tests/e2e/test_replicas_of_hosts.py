# SPDX-License-Identifier: Apache-2.0
"""Data parallel on two hosts: all ranks sleep together; hybrid load balancing."""

import json
import re
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, compares_resident_memory
from e2e.replicas import RANKS, START_TIMEOUT_S, Replicas, replicas
from e2e.server import FORKED, Server, answering, free_port, started
from network.hosts import hosts, need_hosts

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

MAX_TOKENS = 16
POOL = 256 << 20
PROMPTS = [[start + step * 7 % 90 + 3 for step in range(40 + start)] for start in range(12)]


@pytest.fixture
def pair():
    need_hosts()
    with hosts(2) as found:
        yield found


def check(dense, prompts, answers):
    assert max(max(prompt) for prompt in prompts) < VOCAB
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert len(tokens) == MAX_TOKENS
        dense.check(prompt, tokens)


def call(server: Server, method: str, path: str) -> bytes:
    asked = urllib.request.Request(f"{server.url}{path}", method=method)
    with urllib.request.urlopen(asked, timeout=60) as reply:
        return bytes(reply.read())


def held(log: Path) -> int:
    """Returns the resident bytes of the engine that writes to a log."""
    found = re.search(r"^\(EngineCore\w* pid=(\d+)\)", log.read_text(), re.MULTILINE)
    assert found is not None
    return psutil.Process(int(found[1])).memory_info().rss


def test_all_ranks_sleep_and_wake_up(tiny, tmp_path, pair):
    compares_resident_memory()
    options = [
        "--max-model-len",
        "256",
        "--kv-cache-memory-bytes",
        str(POOL),
        "--enable-sleep-mode",
    ]
    dense = Dense(tiny)
    with replicas(tiny, options, tmp_path, pair, FORKED | {"VLLM_SERVER_DEV_MODE": "1"}) as running:
        check(dense, PROMPTS, running.ask(PROMPTS, MAX_TOKENS))
        logs = (running.server.log, running.log)
        awake = [held(log) for log in logs]
        call(running.server, "POST", "/sleep?level=1")
        assert json.loads(call(running.server, "GET", "/is_sleeping")) == {"is_sleeping": True}
        asleep = [held(log) for log in logs]
        assert all(a - b >= 0.9 * POOL for a, b in zip(awake, asleep, strict=True))
        call(running.server, "POST", "/wake_up")
        assert json.loads(call(running.server, "GET", "/is_sleeping")) == {"is_sleeping": False}
        before = running.metrics("vllm:request_success_total")
        check(dense, PROMPTS, running.ask(PROMPTS, MAX_TOKENS))
        after = running.metrics("vllm:request_success_total")
        assert all(now > then for now, then in zip(after, before, strict=True))


def test_each_host_of_two_ranks_answers_its_own_clients(tiny, tmp_path, pair):
    first, second = pair
    options = [
        *("--max-model-len", "256", "--kv-cache-memory-bytes", str(16 << 20)),
        *("--served-model-name", "m", "--data-parallel-hybrid-lb"),
        *("--data-parallel-size", "4", "--data-parallel-size-local", "2"),
        *("--data-parallel-address", first.address, "--data-parallel-rpc-port", "13345"),
    ]
    dense = Dense(tiny)
    with ExitStack() as stack:
        servers = []
        for host, start in ((first, "0"), (second, "2")):
            log, port = tmp_path / f"from-{start}.log", free_port()
            given = [*options, "--data-parallel-start-rank", start, "--port", str(port)]
            process = stack.enter_context(started(tiny, given, FORKED, log, host=host))
            servers.append(Server(f"http://{host.address}:{port}", log, process))
        for server in servers:
            answering(server, START_TIMEOUT_S)
        for server, ranks in zip(servers, (RANKS, ("2", "3")), strict=True):
            check(dense, PROMPTS, Replicas(server, server.process, server.log).ask(PROMPTS, 16))
            served = [server.metric("vllm:request_success_total", engine=rank) for rank in ranks]
            assert sum(served) == len(PROMPTS) and min(served) > 0
