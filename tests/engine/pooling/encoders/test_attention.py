# SPDX-License-Identifier: Apache-2.0
"""Batched encoder attention equals that of each text alone, by the formula."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from vllm_metal.engine.pooling.encoders import attention
from vllm_metal.engine.pooling.encoders.attention import TextAttention, groups, plan
from vllm_metal.patches.mlx_patches.seam import Scoring

HEADS, KV_HEADS, SIZE, SCALE = 4, 2, 8, 0.3


def starts_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def random_rows(count, heads, seed):
    return np.random.default_rng(seed).standard_normal((count, heads, 1, SIZE)).astype(np.float32)


def by_formula(queries, keys, values, lengths, window):
    """Computes softmax attention over each text in float64; returns [T, H, 1, D]."""
    out = np.zeros(queries.shape)
    starts = starts_of(lengths)
    for begin, end in itertools.pairwise(starts):
        at = np.arange(end - begin)
        seen = np.abs(at[:, None] - at) <= (len(at) if window is None else window)
        for head in range(HEADS):
            q = queries[begin:end, head, 0].astype(np.float64)
            k, v = (x[begin:end, head * KV_HEADS // HEADS, 0].astype(float) for x in (keys, values))
            weights = np.where(seen, np.exp(SCALE * q @ k.T), 0)
            out[begin:end, head, 0] = weights / weights.sum(-1, keepdims=True) @ v
    return out


@pytest.mark.parametrize("most_scores", [attention.MAX_SCORES, 1])
@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize(
    "lengths", [[1], [7], [5, 5, 5], [1, 200, 3, 190, 64, 65, 2], [130, 129, 128, 1]]
)
def test_each_row_sees_its_text(lengths, window, most_scores, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SCORES", most_scores)  # 1: chunks of MIN_QUERIES
    count = sum(lengths)
    q = random_rows(count, HEADS, 0)
    k, v = (random_rows(count, KV_HEADS, seed) for seed in (1, 2))
    cache = TextAttention(plan(starts_of(lengths), window), mx.zeros(count, mx.int32))
    out = cache.attend(mx.array(q), mx.array(k), mx.array(v), Scoring(SCALE))
    assert np.allclose(np.array(out), by_formula(q, k, v, lengths, window), atol=1e-5)


def test_texts_of_one_length_are_taken_as_they_are():
    of_four = plan(starts_of([9] * 4), None)
    (piece,) = of_four.pieces
    assert of_four.order is None and piece.mask is None


def test_groups_hold_every_text_once_and_little_padding():
    lengths = np.random.default_rng(0).integers(1, 500, 300).astype(np.int32)
    found = groups(lengths)
    assert sorted(np.concatenate(found).tolist()) == list(range(300))
    for group in found:
        shortest, longest = lengths[group].min(), lengths[group].max()
        assert longest <= attention.PADDING * shortest + attention.SLACK
    padded = sum(len(group) * lengths[group].max() for group in found)
    assert padded < 1.2 * lengths.sum()
    # A group begins only where the one before could not go on.
    assert len(found) < 2 + np.log(500) / np.log(attention.PADDING)


def test_groups_have_a_bound(monkeypatch):
    monkeypatch.setattr(attention, "MAX_ROWS", 100)
    found = groups(np.array([30] * 10 + [300] * 2, np.int32))
    assert [len(group) for group in found] == [3, 3, 3, 1, 1, 1]


@pytest.mark.parametrize("window", [None, 40])
def test_scores_have_a_bound(window, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SCORES", 64 * 512)
    for piece in plan(starts_of([2000, 1900, 10]), window).pieces:
        texts, rows = piece.queries.shape
        assert rows <= attention.MIN_QUERIES or texts * rows * piece.keys.shape[1] <= 64 * 512
        if window is not None:
            assert piece.keys.shape[1] <= rows + 2 * window


def test_capped_scores_are_refused():
    cache = TextAttention(plan(starts_of([2]), None), mx.zeros(2, mx.int32))
    rows = mx.zeros((2, HEADS, 1, SIZE))
    with pytest.raises(NotImplementedError, match="soft cap"):
        cache.attend(rows, rows, rows, Scoring(SCALE, softcap=30.0))
