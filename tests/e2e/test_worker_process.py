# SPDX-License-Identifier: Apache-2.0
"""K/V transfers with a worker in its own process: vLLM's mp executor."""

import pytest
from e2e.disk import ask, check_same, disk_engine, disk_hits, pages, random_prompts
from e2e.fuzz.models import VOCAB
from e2e.harness import run_out
from e2e.peers import consumer, decode, free_port, prefill, producer
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

#: vLLM rejects this executor's name for one device.
APART = {"distributed_executor_backend": MultiprocExecutor}
pytestmark = pytest.mark.more


@pytest.fixture(autouse=True)
def spawned(monkeypatch):
    """Spawns engines: a fork of a process that has used MLX hangs."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def test_what_the_pool_has_lost_is_found_on_disk(tiny, tmp_path):
    """Files have the names that an engine in one process gives them."""
    prompts = random_prompts([100, 60], VOCAB)
    with disk_engine(tiny, tmp_path / "other") as llm:
        expected = ask(llm, prompts)
    with disk_engine(tiny, tmp_path / "cache", **APART) as llm:
        check_same(ask(llm, prompts), expected)
        run_out(llm)
        assert disk_hits(llm) == 0 and llm.reset_prefix_cache()
        check_same(ask(llm, prompts), expected)
        assert disk_hits(llm) == 96 + 48
    assert [path.name for path in pages(tmp_path / "cache")] == [
        path.name for path in pages(tmp_path / "other")
    ]


@pytest.mark.slow
def test_disaggregated_prefill(tiny):
    """Many prompts, because a step is rarely laid out while the last one's tokens are read."""
    prompts = random_prompts([100] * 24, VOCAB)
    port = free_port()
    with producer(tiny, port) as p, consumer(tiny, port) as d:
        expected = [decode(d, prompt, prefill(p, prompt)) for prompt in prompts]
    port = free_port()  # another process may have taken the first one since
    with producer(tiny, port, **APART) as p, consumer(tiny, port, **APART) as d:
        assert [decode(d, prompt, prefill(p, prompt)) for prompt in prompts] == expected
    assert [each.pulled for each in expected] == [96] * len(prompts)
