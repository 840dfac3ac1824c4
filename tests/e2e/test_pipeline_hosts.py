# SPDX-License-Identifier: Apache-2.0
"""Two hosts with a rank each: the tokens of one process; an error once the cable is out."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense
from e2e.server import VLLM
from network import hosts as network

pytestmark = pytest.mark.slow
PROMPTS = [[3 + (each * 7 + place) % (VOCAB - 3) for place in range(40)] for each in range(4)]
SECONDS = 10.0


def command(model, node, master):
    return [
        *(sys.executable, *VLLM, "serve", model, "--served-model-name", "toy"),
        *("--max-model-len", "512"),
        *("--kv-cache-memory-bytes", str(32 << 20), "--pipeline-parallel-size", "2"),
        *("--nnodes", "2", "--node-rank", str(node)),
        *("--master-addr", master, "--master-port", "29517"),
        *(("--headless",) if node else ("--host", "0.0.0.0", "--port", "8000")),
    ]


@contextmanager
def two_ranks(models, pair, folder):
    """A rank on each host; the first one's URL, and both processes."""
    processes = []
    try:
        for node, (host, model) in enumerate(zip(pair, models, strict=True)):
            environment = os.environ | {
                "VLLM_HOST_IP": host.address,
                "GLOO_SOCKET_IFNAME": "eth0",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            }
            processes.append(
                host.popen(
                    *command(model, node, pair[0].address),
                    env=environment,
                    stdout=(folder / f"log{node}").open("w"),
                    stderr=subprocess.STDOUT,
                )
            )
        yield f"http://{pair[0].address}:8000", processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def ask(url, prompt, max_tokens=16):
    body = {"model": "toy", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def wait_until_healthy(url, processes, seconds=600):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.5)


def test_a_rank_on_each_of_two_hosts(short, tmp_path):
    network.need_hosts()
    dense = Dense(short)
    with network.hosts(2) as pair:
        with two_ranks((short, short), pair, tmp_path) as (url, processes):
            wait_until_healthy(url, processes)
            for prompt in PROMPTS:
                dense.check(prompt, ask(url, prompt))
            sent = pair[0].sent_bytes
            assert sent > 0
            before = time.monotonic()
            pair[1].cut()
            with pytest.raises((OSError, urllib.error.HTTPError)):
                ask(url, PROMPTS[0], 400)
            assert time.monotonic() - before < SECONDS
            for process in processes:
                process.wait(60)
        pair[1].mend()
        with two_ranks((short, short), pair, tmp_path) as (url, processes):
            wait_until_healthy(url, processes)
            dense.check(PROMPTS[1], ask(url, PROMPTS[1]))


def test_other_weights_are_refused_on_both(short, tmp_path):
    network.need_hosts()
    other = tmp_path / "other"
    other.mkdir()
    for path in os.scandir(short):
        content = bytearray(Path(path).read_bytes())
        if path.name.endswith(".safetensors"):
            content[-1] ^= 1
        (other / path.name).write_bytes(content)
    with network.hosts(2) as pair, two_ranks((short, str(other)), pair, tmp_path) as (_, processes):
        for process in processes:
            assert process.wait(600) != 0
    for node in range(2):
        assert re.search(
            "ranks 0 and 1 of the engine differ: .*weights", (tmp_path / f"log{node}").read_text()
        )
