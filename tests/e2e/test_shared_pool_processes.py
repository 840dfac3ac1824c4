# SPDX-License-Identifier: Apache-2.0
"""Engines in separate processes: peers wake an idle one."""

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, engine, greedy
from e2e.peers import free_port, transfer
from vllm import TokensPrompt

pytestmark = pytest.mark.more


def test_an_idle_engine_in_its_own_process_answers_out_of_its_pool(tiny, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    tokens = np.random.default_rng(8).integers(2, VOCAB, 100).tolist()
    ports = free_port(), free_port()
    options = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20}
    roles = [
        transfer(
            "kv_both",
            listen=f"127.0.0.1:{own}",
            peers=[f"127.0.0.1:{other}"],
            share="pool",
            pull="always",
        )
        for own, other in (ports, ports[::-1])
    ]
    with (
        engine(tiny, kv_transfer_config=roles[0], **options) as first,
        engine(tiny, kv_transfer_config=roles[1], **options) as second,
    ):
        (computed,) = first.generate(
            [TokensPrompt(prompt_token_ids=tokens)], greedy(12), use_tqdm=False
        )
        (pulled,) = second.generate(
            [TokensPrompt(prompt_token_ids=tokens)], greedy(12), use_tqdm=False
        )
        assert computed.num_cached_tokens == 0 and pulled.num_cached_tokens == 96
        assert first.reset_prefix_cache()
    for found in (computed, pulled):
        Dense(tiny).check(tokens, list(found.outputs[0].token_ids))
