# SPDX-License-Identifier: Apache-2.0
"""Data parallel on two hosts: tokens equal one process's on any rank."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
from e2e.fuzz.models import VOCAB, write_experts
from e2e.harness import Dense, make_prompts, text_tokens
from e2e.replicas import START_TIMEOUT_S, of_launcher, of_server, replicas
from e2e.server import FORKED, SPAWNED, started
from network.hosts import hosts, need_hosts

pytestmark = [pytest.mark.more, pytest.mark.timeout(1800)]

MAX_TOKENS = 48
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
#: Seconds until clients hear of a rank that is gone, as is promised; and until all has ended.
TOLD_S, ENDED_S = 10.0, 60.0


@pytest.fixture
def pair():
    need_hosts()
    with hosts(2) as found:
        yield found


@pytest.fixture
def model(request, short, tmp_path):
    """A model folder, and prompts of which half share a prefix."""
    if request.param == "experts":
        tokens = np.random.default_rng(7).integers(2, VOCAB, 2000).tolist()
        return write_experts(tmp_path / "experts"), make_prompts(tokens, 64, 400)
    return short, make_prompts(text_tokens(short), 64, 700)


@pytest.mark.parametrize(
    ("model", "speculation", "environment"),
    [
        ("experts", {}, FORKED),
        pytest.param("experts", LOOKUP, FORKED, marks=pytest.mark.slow),
        pytest.param("dense", LOOKUP, FORKED, marks=pytest.mark.slow),
        pytest.param("dense", {}, SPAWNED, marks=pytest.mark.slow),
    ],
    indirect=["model"],
    ids=["experts", "experts, lookup", "dense, lookup", "dense, spawned"],
)
def test_two_hosts_answer_as_one_process(model, speculation, environment, tmp_path, pair):
    folder, prompts = model
    longest = max(map(len, prompts)) + MAX_TOKENS
    options = [
        *("--max-num-seqs", "16", "--max-num-batched-tokens", "64"),
        # One request of the longest has room in a rank's pool, and its share of all has not.
        *("--max-model-len", "768" if longest > 512 else "512"),
        *("--num-gpu-blocks-override", str(longest // 16 + 20)),
        *(["--speculative-config", json.dumps(speculation)] if speculation else []),
    ]
    dense = Dense(folder)
    with replicas(folder, options, tmp_path, pair, environment) as running:
        hits = [0.0, 0.0]
        for _ in range(2):
            for prompt, tokens in zip(prompts, running.ask(prompts, MAX_TOKENS), strict=True):
                assert len(tokens) == MAX_TOKENS
                dense.check(prompt, tokens)
            before, hits = hits, running.metrics("vllm:prefix_cache_hits_total")
            assert all(now > then for now, then in zip(hits, before, strict=True))
        assert min(running.metrics("vllm:num_preemptions_total")) > 0
        served = running.metrics("vllm:request_success_total")
        assert sum(served) == 2 * len(prompts) and min(served) > len(prompts) / 2
        assert min(running.metrics("vllm:metal_step_host_seconds_count")) > 0
        if speculation:
            accepted = running.metrics("vllm:spec_decode_num_accepted_tokens_total")
            assert min(accepted) > 0


def stream(server):
    """Requests a long answer; returns its final error and the time."""
    with server.client() as client:
        try:
            chunks = client.completions.create(
                model="m",
                prompt=[5, 6, 7],
                max_tokens=7000,
                stream=True,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            for _ in chunks:
                pass
        except (openai.APIError, openai.APIConnectionError) as error:
            return error, time.monotonic()
    return None, time.monotonic()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["rank 1 is killed", "rank 1 is cut off"])
def test_clients_hear_of_a_lost_rank_and_a_restart_is_clean(fault, tiny_long, tmp_path, pair):
    _, second = pair
    options = ["--max-model-len", "8192", "--kv-cache-memory-bytes", str(64 << 20)]
    with replicas(tiny_long, options, tmp_path, pair, SPAWNED) as running:
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(stream, running.server) for _ in range(4)]
            deadline = time.monotonic() + ENDED_S
            while min(running.metrics("vllm:num_requests_running")) < 1:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            at = time.monotonic()
            second.kill() if fault == "rank 1 is killed" else second.cut()
            for error, came in (answer.result(ENDED_S) for answer in answers):
                assert error is not None and came - at < TOLD_S
        assert running.server.process.wait(ENDED_S) == 1
        if fault == "rank 1 is cut off":
            running.launcher.wait(ENDED_S)
            assert (
                "the connection to it is lost: shutting down the engine" in running.log.read_text()
            )
            second.mend()
    with replicas(tiny_long, options, tmp_path, pair, SPAWNED) as running:
        assert len(running.ask([[5, 6, 7]] * 4, 4)) == 4
        assert min(running.metrics("vllm:request_success_total")) > 0


@pytest.mark.slow
def test_a_rank_that_computes_otherwise_keeps_the_server_from_starting(tiny_long, tmp_path, pair):
    first, second = pair
    options = ["--max-model-len", "256", "--kv-cache-memory-bytes", str(16 << 20)]
    otherwise = [*of_launcher(first), *options, "--kv-cache-dtype", "fp8"]
    log = tmp_path / "rank-0.log"
    with (
        started(tiny_long, otherwise, FORKED, tmp_path / "rank-1.log", host=second) as launcher,
        started(tiny_long, [*of_server(first), *options], FORKED, log, host=first) as server,
    ):
        assert server.wait(START_TIMEOUT_S) != 0
        assert launcher.wait(ENDED_S) == 0
    assert "would give different tokens: kv_cache_dtype" in log.read_text()


@pytest.fixture
def tiny_long(tmp_path):
    """A model with answers longer than the detection of a failure."""
    folder = Path(write_experts(tmp_path / "long"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return str(folder)
