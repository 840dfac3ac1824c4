# SPDX-License-Identifier: Apache-2.0
"""An engine whose pool others may have: what they get of it, and what it costs the engine."""

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import counters
from e2e.peers import free_port
from e2e.sharing import Replicas, alone, core_of

BLOCK = 16


def prompt_of(length, seed=8):
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


def test_an_idle_engine_answers_out_of_its_pool(tiny):
    prompt = prompt_of(100)
    expected = alone(tiny, [prompt])
    with Replicas(tiny, 2) as pair:
        first = pair.ask(0, prompt)
        assert counters(pair[0])["vllm:kv_shared_pages"] == 0
        second = pair.ask(1, prompt)
        assert [first.tokens, second.tokens] == [expected[0], expected[0]]
        assert (first.pulled, second.pulled) == (0, 96)
        assert counters(pair[0])["vllm:kv_shared_pages"] == 6
        assert len(core_of(pair[0]).scheduler.connector._pins) == 0
        assert pair[0].reset_prefix_cache()
        assert pair.ask(1, prompt_of(100, 9)).pulled == 0
