# SPDX-License-Identifier: Apache-2.0
"""The example of a cluster on Ray Serve, on two hosts: a server on each, and a host that dies."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from e2e.models import first_two_layers
from e2e.ray_nodes import needs_ray, ray_nodes
from network import hosts as network

from vllm_metal.models.embedded import embedded_model_path

pytestmark = [pytest.mark.slow, needs_ray, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "cluster" / "serve.py"
START_S = 800.0
ANSWERED = '"POST /v1/completions HTTP/1.1" 200'  # in a server's log
PROMPTS = [f"{number}. The river rises in the hills" for number in range(12)]


def wait_for(condition, process):
    deadline = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.25)


@contextmanager
def served(pair, cluster, model, log):
    """The command, on the first host; its URL."""
    command = [
        *(sys.executable, str(SCRIPT), model, "--host", "0.0.0.0", "--port", "8000"),
        *("--min-replicas", "2", "--max-replicas", "2"),
        *("--", "--served-model-name", "m", "--max-model-len", "1024", "--max-num-seqs", "2"),
        *("--kv-cache-memory-bytes", "64M"),
    ]
    environment = os.environ | cluster | {"RAY_DEDUP_LOGS": "0"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = pair[0].popen(*command, env=environment, **options)
    try:
        wait_for(lambda: "Serving at" in log.read_text(), process)
        yield f"http://{pair[0].address}:8000"
    finally:
        process.terminate()
        process.wait(120)


def ask(url, prompt):
    body = {"model": "m", "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def answered(log, host):
    """How many requests the server of a host has answered: Ray names hosts other than its own."""
    lines = [line for line in log.read_text().splitlines() if ANSWERED in line]
    return sum(f"ip={host.address}" in line for line in lines), len(lines)


def test_a_server_on_each_of_two_hosts_and_then_on_one(tmp_path):
    network.need_hosts()
    (tmp_path / "model").mkdir()
    model = first_two_layers(str(embedded_model_path(dequantize=True)), tmp_path / "model")
    log = tmp_path / "log"
    with (
        network.hosts(2) as pair,
        ray_nodes(tmp_path, [0, 0], pair) as cluster,
        served(pair, cluster, model, log) as url,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        expected = [ask(url, prompt) for prompt in PROMPTS]
        there, all_of_them = answered(log, pair[1])
        assert 0 < there < all_of_them
        asked = [pool.submit(ask, url, prompt) for prompt in PROMPTS]
        before = there
        while answered(log, pair[1])[0] == before:  # until it has answered one of them
            time.sleep(0.05)
        assert not all(each.done() for each in asked)
        pair[1].kill()
        assert [each.result() for each in asked] == expected
        assert [ask(url, prompt) for prompt in PROMPTS] == expected
