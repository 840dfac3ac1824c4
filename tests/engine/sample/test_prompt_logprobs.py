# SPDX-License-Identifier: Apache-2.0
import gc

import mlx.core as mx
import numpy as np
import pytest

from vllm_metal.engine.sample import Logprobs, prompt_logprob_chunks

V, H = 50, 16


def check(
    got: Logprobs,
    logits: np.ndarray,
    targets: np.ndarray,
    num_logprobs: int,
    normalize: bool = True,
) -> None:
    """Checks against the definition in float64. logits: [n, V] that predict the targets."""
    lists = got.to_lists()
    scores = logits.astype(np.float64)
    if normalize:
        scores = scores - scores.max(axis=-1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    width = logits.shape[1] if num_logprobs < 0 else num_logprobs
    best_first = np.argsort(-scores, axis=-1)[:, :width]
    token_ids = np.concatenate([targets[:, None], best_first], axis=1)
    assert lists.logprob_token_ids.tolist() == token_ids.tolist()
    expected = np.take_along_axis(scores, token_ids, axis=-1)
    np.testing.assert_allclose(lists.logprobs, expected, rtol=1e-5, atol=1e-5)
    assert lists.sampled_token_ranks.tolist() == (scores >= expected[:, :1]).sum(axis=-1).tolist()


def prompt_logprobs(logits, targets, num_logprobs, normalize=True):
    """Computes the logprobs of a prompt in one chunk from its logits."""
    (whole,) = prompt_logprob_chunks(
        logits, targets, num_logprobs, lambda rows: rows, len(targets), normalize=normalize
    )
    return whole


def test_ranks_count_ties():
    logits = mx.array([[1.0, 3.0, 3.0, 0.0]])
    for target, rank in [(0, 3), (1, 2), (2, 2), (3, 4)]:
        assert prompt_logprobs(logits, np.array([target]), 0).ranks.item() == rank


@pytest.mark.parametrize("num_logprobs", [0, 3, -1])
def test_prompt_logprobs_are_those_of_the_models_logits(num_logprobs):
    logits = np.random.default_rng(11).normal(scale=2.0, size=(3, V)).astype(np.float32)
    targets = np.array([4, 0, 49])
    check(prompt_logprobs(mx.array(logits), targets, num_logprobs), logits, targets, num_logprobs)


def test_logits_are_reported_as_they_are():
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(5, 1, H)).astype(np.float32)
    head = rng.normal(size=(H, V)).astype(np.float32)
    targets = rng.integers(0, V, 5)
    logits = mx.array(hidden) @ mx.array(head)
    whole = prompt_logprobs(logits[:, 0], targets, 3, normalize=False)
    chunks = prompt_logprob_chunks(
        mx.array(hidden),
        targets,
        3,
        lambda states: (states @ mx.array(head)).reshape(-1, V),
        2,
        normalize=False,
    )
    for found in (whole, Logprobs.joined(chunks)):
        check(found, (hidden @ head).reshape(-1, V), targets, 3, normalize=False)


@pytest.mark.parametrize("num_logprobs", [0, 3, -1])
@pytest.mark.parametrize(("num_rows", "rows_at_once"), [(9, 4), (8, 4), (3, 4), (5, 1), (0, 4)])
def test_chunks_together_are_the_whole_prompt(num_rows, rows_at_once, num_logprobs):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(num_rows, 1, H)).astype(np.float32)
    head = rng.normal(size=(H, V)).astype(np.float32)
    targets = rng.integers(0, V, num_rows)
    asked = []

    def compute_logits(states: mx.array) -> mx.array:
        asked.append(states.shape)
        return (states @ mx.array(head)).reshape(-1, V)

    chunks = prompt_logprob_chunks(
        mx.array(hidden), targets, num_logprobs, compute_logits, rows_at_once, [mx.zeros(1)]
    )
    sizes = [min(rows_at_once, num_rows - s) for s in range(0, num_rows, rows_at_once)]
    assert asked == [(size, 1, H) for size in sizes]
    assert len(chunks) == len(sizes)
    if chunks:
        whole = Logprobs.joined(chunks)
        check(whole, (hidden @ head).reshape(-1, V), targets, num_logprobs)


def peak(num_requests: int, rows_each: int) -> int:
    """Bytes at most while all prompt logprobs are computed, 8 rows at once, the latest asked for
    first."""
    wide = 2**15
    hidden, head = mx.ones((rows_each, 1, H)), mx.ones((H, wide))
    targets = np.zeros(rows_each, dtype=np.int32)
    mx.eval(hidden, head)
    gc.collect()  # what other tests left
    at_rest = mx.get_active_memory()
    mx.reset_peak_memory()
    chunks: list[Logprobs] = []
    for _ in range(num_requests):
        after = chunks[-1].arrays() if chunks else ()
        chunks += prompt_logprob_chunks(
            hidden, targets, 1, lambda states: (states @ head)[:, 0], 8, after
        )
    assert len(chunks) == num_requests * rows_each // 8
    mx.eval([chunk.arrays() for chunk in reversed(chunks)])
    return mx.get_peak_memory() - at_rest


@pytest.mark.parametrize(("num_requests", "rows_each"), [(1, 256), (32, 8)])
def test_memory_does_not_grow_with_the_chunks(num_requests, rows_each):
    """Neither within a request's prompt nor from one request to the next. MLX allocates for a few
    operations ahead of the CPU, so three chunks are in memory here; without order it is nine."""
    assert peak(num_requests, rows_each) < 5 * peak(1, 8)
