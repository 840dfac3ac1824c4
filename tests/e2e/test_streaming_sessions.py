# SPDX-License-Identifier: Apache-2.0
"""Sessions of streaming input: every turn is answered as its whole text asked at once would be."""

import asyncio

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.harness import Dense, counters, engine, free_blocks, generate, greedy, run_out
from e2e.sessions import Session, check, held_rows, play, step_until, streamed, whole_texts

NUM_TURNS, MAX_TOKENS = 5, 8
STOPS = list(range(3, VOCAB, 9))  # so many that about every other turn ends at one
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


def scripts_of(count, seed=0):
    """Turns of some sessions; the first ones of two begin alike, and turns repeat themselves."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(2, VOCAB, 36).tolist()
    found = []
    for index in range(count):
        turns = []
        for number in range(NUM_TURNS):
            turn = rng.integers(2, VOCAB, int(rng.integers(1, 9))).tolist()
            turns.append((shared if number == 0 and index % 2 else []) + turn * (1 + number % 3))
        found.append(turns)
    return found


def draft_model(folder, name):
    return {
        "method": "draft_model",
        "model": str(folder / f"{name}-draft"),
        "num_speculative_tokens": 3,
    }


def small_engine(model, **options):
    settings = {
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "additional_config": {"fixed_draft_length": True},
    }
    return engine(model, **(settings | options))


def assert_nothing_is_held(llm, free):
    run_out(llm)
    assert free_blocks(llm) == free, "blocks were never freed"
    assert held_rows(llm) == 0, "the worker still knows requests"


#: Engines by what is special about them.
SPECULATION = {"plain": None, "ngram": NGRAM, "draft model": "draft"}


@pytest.mark.parametrize("ends", ["max_tokens", "stop tokens"])
@pytest.mark.parametrize("async_scheduling", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("speculation", SPECULATION)
@pytest.mark.parametrize("name", ["full", "windowed", "hybrid"])
def test_five_turns(tiny_models, name, speculation, async_scheduling, ends):
    """Two rounds: all turns sent ahead, and each when the one before was answered.

    In the first the pool has no room for all that runs, so turns are preempted. In the second
    sessions begin as those of the first did.
    """
    model, dense = str(tiny_models / name), Dense(str(tiny_models / name))
    config = SPECULATION[speculation]
    if config == "draft":
        config = draft_model(tiny_models, name)
    params = streamed(
        max_tokens=MAX_TOKENS, stop_token_ids=STOPS if ends == "stop tokens" else None
    )
    with small_engine(
        model,
        speculative_config=config,
        async_scheduling=async_scheduling,
        num_gpu_blocks_override=BLOCKS[name],
    ) as llm:
        free = free_blocks(llm)
        for ahead in (True, False):
            scripts = {
                Session(llm, f"{ahead} {number}", params): turns
                for number, turns in enumerate(scripts_of(4))
            }
            play(llm, scripts, ahead)
            for session, turns in scripts.items():
                check(dense, turns, session.answers)
                for answer, (reason, stop) in zip(session.answers, session.reasons, strict=True):
                    at_stop = ends == "stop tokens" and answer[-1] in STOPS
                    assert (reason, stop) == (("stop", answer[-1]) if at_stop else ("length", None))
                    assert at_stop or len(answer) == MAX_TOKENS
            assert_nothing_is_held(llm, free)
        found = counters(llm)
        assert found["vllm:num_preemptions"] > 0
        assert found["vllm:prefix_cache_hits"] > 0
        if config:
            assert found["vllm:spec_decode_num_accepted_tokens"] > 0
        # Asked at once, the longest texts get the same answers.
        whole = {session: whole_texts(turns, session.answers) for session, turns in scripts.items()}
        asked = generate(
            llm,
            [texts[-1] for texts in whole.values()],
            greedy(MAX_TOKENS, detokenize=False, stop_token_ids=params.stop_token_ids),
        )
        assert asked == [session.answers[-1] for session in whole]


#: Of pools in which four sessions have no room at once.
BLOCKS = {"full": 26, "windowed": 60, "hybrid": 40}
