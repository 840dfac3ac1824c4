# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel on Ray: the tokens of one process, and failures."""

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import openai
import psutil
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense
from e2e.ray_nodes import needs_ray, ray_nodes
from e2e.server import SPAWNED, serve
from network import hosts as network

pytestmark = [pytest.mark.slow, needs_ray, pytest.mark.timeout(1800)]
SECONDS = 10.0
START_S = 600.0
TOKENS = 16
OPTIONS = (
    *("--served-model-name", "m", "--max-model-len", "1024", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", str(32 << 20)),
    *("--pipeline-parallel-size", "2", "--distributed-executor-backend", "ray"),
)
PROMPTS = [[3 + (each * 7 + place) % (VOCAB - 3) for place in range(200)] for each in range(8)]


def ranks(server):
    """Returns the rank processes by their log prefixes."""
    found = re.findall(r"\(Worker_PP(\d) pid=(\d+)\)", server.log.read_text())
    return {int(rank): psutil.Process(int(pid)) for rank, pid in found}


def started(model, cluster, log, **more):
    environment = {**cluster, **SPAWNED, "RAY_DEDUP_LOGS": "0"}
    return serve(model, OPTIONS, log, environment=environment, start_timeout_s=START_S, **more)


def ask(server, prompt, **more):
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    reply = httpx.post(f"{server.url}/v1/completions", json=body | more, timeout=300)
    reply.raise_for_status()
    return reply.json()["choices"][0]["token_ids"]


def check_tokens(server, dense):
    """Checks concurrent requests, and each again with a cached prompt."""
    for _ in range(2):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(partial(ask, server), PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            dense.check(prompt, answer)
    assert server.metric("vllm:prefix_cache_hits_total") > 0


def seconds_until_an_error(server, break_it):
    """Returns the time until a streaming client gets an error."""
    asked = {"prompt": PROMPTS[0], "max_tokens": 700, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    with server.client() as client:
        events = client.completions.create(model="m", stream=True, **asked)
        next(events)
        begun = time.monotonic()
        break_it()
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            for _ in events:
                pass
    return time.monotonic() - begun


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_two_ranks_of_one_machine(short, tmp_path, number):
    dense = Dense(short)
    with ray_nodes(tmp_path, [2]) as cluster:
        with started(short, cluster, tmp_path / "log") as server:
            here = ranks(server)
            assert sorted(here) == [0, 1]
            check_tokens(server, dense)
            pid = here[1].pid
            assert seconds_until_an_error(server, lambda: os.kill(pid, number)) < SECONDS
            assert server.process.wait(60) != 0
        for rank in here.values():
            rank.wait(30)
        with started(short, cluster, tmp_path / "again") as server:
            dense.check(PROMPTS[0], ask(server, PROMPTS[0]))


def test_a_rank_on_each_of_two_hosts(short, tmp_path):
    network.need_hosts()
    with (
        network.hosts(2) as pair,
        ray_nodes(tmp_path, [1, 1], pair) as cluster,
        started(short, cluster, tmp_path / "log", host=pair[0]) as server,
    ):
        before = pair[1].sent_bytes
        check_tokens(server, Dense(short))
        assert pair[1].sent_bytes > before
        assert seconds_until_an_error(server, pair[1].cut) < SECONDS
        assert server.process.wait(60) != 0
