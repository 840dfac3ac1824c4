# SPDX-License-Identifier: Apache-2.0
"""Many streaming clients on a pool a quarter of the needed size, for minutes; nightly."""

import asyncio
import os
import time

import numpy as np
import psutil
import pytest
from e2e.fuzz.models import MAX_LEN, VOCAB, write_models
from e2e.harness import Dense, compares_resident_memory
from e2e.server import serve
from openai import AsyncOpenAI

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
CLIENTS, MAX_TOKENS, BLOCK_SIZE = 64, 48, 16
#: Bytes that Python's allocator and a busy server's buffers may grow after the first third.
TOLERANCE = 32 << 20


def make_prompts():
    """Makes prompts of 16 to 200 tokens, many with shared prefixes."""
    rng = np.random.default_rng(11)
    stems = [rng.integers(2, VOCAB, 120).tolist() for _ in range(6)]
    prompts = []
    for number in range(96):
        shared = stems[number % 6][: int(rng.integers(0, 120))]
        prompts.append([*shared, *rng.integers(2, VOCAB, int(rng.integers(16, 80))).tolist()])
    return prompts


async def play(server, prompts, deadline):
    """Returns answers by prompt until the deadline, and the servers' memory per second."""
    answers = [set() for _ in prompts]
    asked, memory = iter(range(10**9)), []
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    async def one_client():
        while time.monotonic() < deadline:
            number = next(asked) % len(prompts)
            stream = await client.completions.create(
                model="tiny",
                prompt=prompts[number],
                temperature=0,
                max_tokens=MAX_TOKENS,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            tokens = []
            async for chunk in stream:
                tokens += [token for choice in chunk.choices for token in choice.token_ids or ()]
            assert len(tokens) == MAX_TOKENS
            answers[number].add(tuple(tokens))

    async def watch():
        tree = psutil.Process(server.process.pid)
        while time.monotonic() < deadline:
            processes = [tree, *tree.children(recursive=True)]
            memory.append(sum(process.memory_info().rss for process in processes))
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(one_client() for _ in range(CLIENTS)))
    return answers, memory, next(asked)


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("speculation", [False, True], ids=["plain", "ngram"])
def test_everybody_is_served_right_in_steady_memory(tmp_path, speculation):
    write_models(tmp_path / "models")
    model, prompts = str(tmp_path / "models" / "full"), make_prompts()
    lengths = sorted(len(prompt) + MAX_TOKENS for prompt in prompts)
    need = CLIENTS * int(np.mean(lengths)) // BLOCK_SIZE
    options = [
        *("--served-model-name", "tiny"),
        *("--max-model-len", str(MAX_LEN)),
        *("--max-num-seqs", str(CLIENTS)),
        *("--num-gpu-blocks-override", str(need // 4)),
    ]
    if speculation:
        options += ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}']
    with serve(model, options, tmp_path / "log") as server:
        answers, memory, count = asyncio.run(play(server, prompts, time.monotonic() + SECONDS))
        assert server.metric("vllm:num_preemptions_total") > 0
        assert server.metric("vllm:prefix_cache_hits_total") > 0
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("vllm:kv_cache_usage_perc") == 0
    dense = Dense(model)
    for prompt, found in zip(prompts, answers, strict=True):
        for tokens in found:
            dense.check(prompt, list(tokens))
    settled = memory[len(memory) // 3 :]
    growth = max(settled) - settled[0]
    print(f"{count} requests, memory {settled[0] >> 20} MiB, grown by {growth >> 20} MiB")
    compares_resident_memory()
    assert growth < TOLERANCE
