# SPDX-License-Identifier: Apache-2.0
"""Steps of a running engine need memory for themselves, never for another pool."""

import mlx.core as mx
from e2e.harness import engine, generate, greedy, text_tokens

POOL = 256 << 20


def peak_of_a_run(model, **options):
    prompts = [text_tokens(model)[start : start + 40] for start in range(8)]
    with engine(model, kv_cache_memory_bytes=POOL, async_scheduling=True, **options) as llm:
        assert mx.get_active_memory() > POOL
        generate(llm, prompts, greedy(4))
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        generate(llm, prompts, greedy(12))
        return mx.get_peak_memory() - before


def test_no_step_copies_the_pool(smollm2):
    one_layer = POOL // 30
    assert peak_of_a_run(smollm2) < POOL // 4
    assert one_layer < POOL // 4


def test_no_step_copies_a_pool_that_groups_share(gemma3):
    assert peak_of_a_run(gemma3) < POOL // 4
