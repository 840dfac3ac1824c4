# SPDX-License-Identifier: Apache-2.0
"""Replicas behind a round robin find almost as many cached tokens as one engine."""

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB
from e2e.sharing import Replicas

pytestmark = pytest.mark.slow
PREFIXES, PREFIX, QUESTION, ANSWER = 8, 96, 8, 4
BLOCK = 16


def trace(number):
    """Returns each prefix 1.5 × number times, each time with a new question."""
    rng = np.random.default_rng(8)
    prefixes = rng.integers(2, VOCAB, (PREFIXES, PREFIX))
    return [
        [*prefix.tolist(), *rng.integers(2, VOCAB, QUESTION).tolist()]
        for prefix in prefixes
        for _ in range(3 * number // 2)
    ]


def play(model, prompts, number, share, **options):
    """Sends requests round robin; returns the cached share of tokens and the answers."""
    with Replicas(model, number, share, **options) as replicas:
        found = [replicas.ask(turn % number, prompt, ANSWER) for turn, prompt in enumerate(prompts)]
    cached = sum(each.cached for each in found) / sum(map(len, prompts))
    return cached, [each.tokens for each in found]


@pytest.mark.parametrize("number", [2, 4])
def test_round_robin_with_sharing_is_as_good_as_one_engine(tiny, number):
    """Pools hold all. Without sharing each of N replicas computes a prefix once: of 1.5 × N times
    N, where one engine computes it once."""
    prompts, times, whole = trace(number), 3 * number // 2, PREFIX / (PREFIX + QUESTION)
    one, answers = play(tiny, prompts, 1, False)
    assert one == pytest.approx(whole * (times - 1) / times)
    apart, of_apart = play(tiny, prompts, number, False)
    assert apart == pytest.approx(whole * (times - number) / times)
    shared, of_shared = play(tiny, prompts, number, True)
    print(f"{number} replicas: one engine {one:.3f}, apart {apart:.3f}, sharing {shared:.3f}")
    assert of_apart == of_shared == answers
    assert shared >= 0.95 * one


@pytest.mark.parametrize("number", [2, 4])
def test_pools_of_half(tiny, number):
    """Each replica's pool holds half of the rotating prefixes. Prints figures and asserts none."""
    in_a_row, times = trace(number), 3 * number // 2
    prompts = [prompt for turn in range(times) for prompt in in_a_row[turn::times]]
    options = {"num_gpu_blocks_override": PREFIXES // 2 * (PREFIX // BLOCK) + 8}
    one, answers = play(tiny, prompts, 1, False, **options)
    apart, of_apart = play(tiny, prompts, number, False, **options)
    shared, of_shared = play(tiny, prompts, number, True, **options)
    print(f"{number} replicas, pools of half: {one:.3f}, apart {apart:.3f}, sharing {shared:.3f}")
    assert of_apart == of_shared == answers
    assert shared >= apart
