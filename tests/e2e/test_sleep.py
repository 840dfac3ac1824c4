# SPDX-License-Identifier: Apache-2.0
"""A sleeping engine frees its memory, and continues unchanged after waking up."""

from types import SimpleNamespace

import mlx.core as mx
import psutil
import pytest
from e2e.harness import Dense, counters, engine, generate, greedy, text_tokens

POOL = 64 << 20


@pytest.mark.parametrize(
    ("level", "speculative_config"),
    [(1, None), pytest.param(2, "draft", marks=pytest.mark.more)],
)
def test_memory_comes_back_and_answers_stay(short, level, speculative_config):
    if speculative_config:
        speculative_config = {"method": "draft_model", "model": short} | {
            "num_speculative_tokens": 2
        }
    text, dense = text_tokens(short), Dense(short)
    prompts = [text[:40], text[:70]]
    others = mx.get_active_memory()
    with engine(
        short,
        kv_cache_memory_bytes=POOL,
        max_model_len=256,
        enable_sleep_mode=True,
        speculative_config=speculative_config,
    ) as llm:
        awake = mx.get_active_memory()  # later on it has a last step's logits as well
        before = generate(llm, prompts, greedy(4))
        llm.sleep(level)
        assert llm.llm_engine.is_sleeping()
        with pytest.raises(RuntimeError, match="Call wake_up"):
            generate(llm, prompts, greedy(4))
        asleep = mx.get_active_memory()
        assert awake - asleep >= 0.95 * POOL
        if level == 2:
            assert asleep - others < 1 << 20
        llm.wake_up()
        assert mx.get_active_memory() == pytest.approx(awake, abs=1 << 20)
        hits = counters(llm)["vllm:prefix_cache_hits"]
        assert generate(llm, prompts[:1], greedy(4)) == before[:1]
        assert counters(llm)["vllm:prefix_cache_hits"] == hits  # nothing it held is there any more
        assert generate(llm, prompts, greedy(4)) == before
        assert counters(llm)["vllm:prefix_cache_hits"] > hits
        for prompt, tokens in zip(prompts, before, strict=True):
            dense.check(prompt, tokens)


def test_an_engine_whose_memory_others_have_sleeps_on(short, monkeypatch):
    prompt = text_tokens(short)[:40]
    with engine(
        short, kv_cache_memory_bytes=POOL, max_model_len=256, enable_sleep_mode=True
    ) as llm:
        before = generate(llm, [prompt], greedy(4))
        llm.sleep(1)
        with monkeypatch.context() as others:
            left = SimpleNamespace(available=POOL // 2, total=psutil.virtual_memory().total)
            others.setattr("psutil.virtual_memory", lambda: left)
            with pytest.raises(RuntimeError, match=r"takes 0\.06 GiB, but only 0\.03"):
                llm.wake_up()
            assert llm.llm_engine.is_sleeping()
        llm.wake_up()
        assert generate(llm, [prompt], greedy(4)) == before


@pytest.mark.more
def test_weights_and_cache_wake_up_apart(short):
    prompt = text_tokens(short)[:40]
    with engine(
        short, kv_cache_memory_bytes=POOL, max_model_len=256, enable_sleep_mode=True
    ) as llm:
        before = generate(llm, [prompt], greedy(4))
        llm.sleep(2)
        with pytest.raises(RuntimeError, match="weights are not loaded"):
            llm.wake_up(["kv_cache"])
        llm.wake_up(["weights"])
        llm.collective_rpc("reload_weights")
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(["kv_cache"])
        assert generate(llm, [prompt], greedy(4)) == before


def test_kept_requests_go_on_where_they_were(short):
    text, dense = text_tokens(short), Dense(short)
    prompts = [text[:20], text[30:80]]
    with engine(
        short, kv_cache_memory_bytes=POOL, max_model_len=256, enable_sleep_mode=True
    ) as llm:
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy(12))
        done = []
        for _ in range(5):
            done += llm.llm_engine.step()
        llm.sleep(1, mode="keep")
        llm.wake_up()
        while llm.llm_engine.has_unfinished_requests():
            done += llm.llm_engine.step()
        finished = {output.request_id: output for output in done if output.finished}
        for index, prompt in enumerate(prompts):
            tokens = list(finished[str(index)].outputs[0].token_ids)
            assert len(tokens) == 12
            dense.check(prompt, tokens)
