# SPDX-License-Identifier: Apache-2.0
"""A step that fails ends its own requests, with the reason, and nothing else."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, engine, free_blocks, generate, greedy

from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.models.executor import ModelExecutor

NUM_TOKENS = 6
POISON = VOCAB - 1


@pytest.fixture(scope="module")
def dense(tiny):
    return Dense(tiny)


@pytest.fixture(scope="module")
def text():
    """Makes a text without POISON."""
    return np.random.default_rng(2).integers(2, POISON, 500).tolist()


def serve(llm, prompts):
    """Returns the completions of prompts that are sent at once."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], greedy(NUM_TOKENS), use_tqdm=False
    )
    return [output.outputs[0] for output in outputs]


#: Points where a step can fail: while laid out, when handed over, when its tokens are due.
PLACES = {
    "laid out": (ModelExecutor, "forward_hidden"),
    "handed over": (mx, "async_eval"),
    "awaited": (StepOutput, "token_ids"),
}


@pytest.mark.parametrize(
    ("place", "async_scheduling"),
    [
        *((place, True) for place in PLACES),
        pytest.param("laid out", False, marks=pytest.mark.more),
        pytest.param("handed over", False, marks=pytest.mark.slow),
        pytest.param("awaited", False, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_raises(tiny, dense, text, monkeypatch, place, async_scheduling):
    prompts = [text[:40], text[:25], text[100:130], text[:33]]
    with engine(tiny, max_model_len=128, max_num_seqs=2, async_scheduling=async_scheduling) as llm:
        free, calls = free_blocks(llm), 0
        holder, name = PLACES[place]
        original = getattr(holder, name)

        def raise_once(*arguments):
            nonlocal calls
            calls += 1
            if calls == 3:
                raise RuntimeError("[malloc] Unable to allocate 42 bytes.")
            return original(*arguments)

        monkeypatch.setattr(holder, name, raise_once)
        *failed, third, fourth = serve(llm, prompts)
        for completion in failed:  # two at a time are served
            assert completion.finish_reason == "error"
            assert "Unable to allocate 42" in completion.stop_reason
        for prompt, completion in zip(prompts[2:], (third, fourth), strict=True):
            assert completion.finish_reason == "length"
            dense.check(prompt, list(completion.token_ids))
        assert free_blocks(llm) == free
        # The failed step's part of the prefix cache is gone, and what came after is there.
        hits = counters(llm)["vllm:prefix_cache_hits"]
        (tokens,) = generate(llm, prompts[:1], greedy(NUM_TOKENS))
        dense.check(prompts[0], tokens)
        assert counters(llm)["vllm:prefix_cache_hits"] - hits == 32


def test_an_engine_that_only_fails_gives_up(tiny, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("no device")

    with engine(tiny, max_model_len=128, max_num_seqs=1) as llm:
        monkeypatch.setattr(ModelExecutor, "forward_hidden", fail)
        with pytest.raises(RuntimeError, match="no device"):
            serve(llm, [[1, 2, 3]] * 8)


class Poisoned(nn.Module):
    """An embedding that is NaN for one token."""

    def __init__(self, embedding: nn.Embedding, token: int) -> None:
        super().__init__()
        self.embedding, self.token = embedding, token

    def __call__(self, ids: mx.array) -> mx.array:
        return mx.where((ids == self.token)[..., None], mx.nan, self.embedding(ids))


@pytest.mark.parametrize(
    "speculative_config",
    [None, pytest.param({"method": "ngram"}, marks=pytest.mark.more)],
    ids=["plain", "ngram"],
)
def test_logits_that_are_not_numbers(tiny, dense, text, speculative_config):
    if speculative_config:
        speculative_config |= {"num_speculative_tokens": 3, "prompt_lookup_max": 3}
    prompts = [text[:50], [*text[:20], POISON, *text[20:48]], text[:35]]
    with engine(
        tiny,
        max_model_len=256,
        num_gpu_blocks_override=17,
        speculative_config=speculative_config,
        additional_config={"fixed_draft_length": True},
    ) as llm:

        def spoil(worker):
            body = worker.get_model().model
            body.embed_tokens = Poisoned(body.embed_tokens, POISON)

        llm.collective_rpc(spoil)
        free = free_blocks(llm)
        for _ in range(2):
            sound, spoiled, also_sound = serve(llm, prompts)
            assert spoiled.finish_reason == "error"
            assert "NaN" in spoiled.stop_reason
            assert not spoiled.token_ids
            dense.check(prompts[0], list(sound.token_ids))
            dense.check(prompts[2], list(also_sound.token_ids))
            assert free_blocks(llm) == free
        assert counters(llm)["vllm:corrupted_requests"] == 2
        assert counters(llm)["vllm:prefix_cache_hits"] > 0
        # Every block in other hands, mostly unwritten: what it held before does no harm.
        short = [text[n : n + 3] for n in range(free)]
        for prompt, completion in zip(short, serve(llm, short), strict=True):
            dense.check(prompt, list(completion.token_ids))
