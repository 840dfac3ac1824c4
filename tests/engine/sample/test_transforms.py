# SPDX-License-Identifier: Apache-2.0
import mlx.core as mx
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_metal.engine.sample.transforms import (
    apply_bitmask,
    keep_min_p,
    keep_top_k_top_p,
    pack_allowed,
)

seeds = st.integers(0, 2**32 - 1)


@given(seed=seeds, num_rows=st.integers(1, 5), vocab_size=st.integers(1, 100), data=st.data())
def test_bitmask_keeps_exactly_the_set_bits(seed, num_rows, vocab_size, data):
    rng = np.random.default_rng(seed)
    masked = data.draw(st.permutations(range(num_rows)))[: data.draw(st.integers(1, num_rows))]
    words = rng.integers(-(2**31), 2**31, (len(masked), -(-vocab_size // 32))).astype(np.int32)
    logits = rng.normal(size=(num_rows, vocab_size)).astype(np.float32)
    expected = logits.copy()
    for i, row in enumerate(masked):
        for v in range(vocab_size):
            if not (int(words[i, v // 32]) >> (v % 32)) & 1:
                expected[row, v] = -np.inf
    for dtype in (mx.float32, mx.bfloat16):
        given_logits = mx.array(logits).astype(dtype)
        got = apply_bitmask(given_logits, np.array(masked, dtype=np.int32), words)
        assert got.dtype == dtype
        rounded = np.array(given_logits.astype(mx.float32))
        want = np.where(np.isneginf(expected), expected, rounded)
        assert (np.array(got.astype(mx.float32)) == want).all()


@given(vocab_size=st.integers(1, 100), data=st.data())
def test_packed_allowed_tokens_survive_the_bitmask(vocab_size, data):
    allowed = data.draw(st.lists(st.integers(0, vocab_size - 1)))
    words = pack_allowed(np.array(allowed, dtype=np.int32), vocab_size)
    got = apply_bitmask(mx.zeros((1, vocab_size)), np.zeros(1, np.int32), words[None])
    assert set(np.flatnonzero(np.array(got)[0] == 0).tolist()) == set(allowed)


@given(
    seed=seeds,
    vocab_size=st.integers(2, 80),
    scale=st.sampled_from([0.3, 2.0, 10.0]),
    data=st.data(),
)
def test_top_k_top_p_keep_what_the_definition_keeps(seed, vocab_size, scale, data):
    """No ties here. A token whose preceding mass is within 1e-5 of top_p may go either way: that
    is what float32 sums can tell apart."""
    rng = np.random.default_rng(seed)
    num_rows = 4
    values = np.linspace(-scale, scale, vocab_size)
    logits = np.stack([rng.permutation(values) for _ in range(num_rows)]).astype(np.float32)
    some_off = st.one_of(st.integers(1, vocab_size), st.just(vocab_size))
    top_k = np.array([[data.draw(some_off)] for _ in range(num_rows)], dtype=np.int32)
    portion = st.one_of(st.floats(0.01, 1.0), st.just(1.0))
    top_p = np.array([[data.draw(portion)] for _ in range(num_rows)], dtype=np.float32)
    got = np.array(keep_top_k_top_p(mx.array(logits), top_k, top_p))
    for row in range(num_rows):
        order = np.argsort(-logits[row])
        k, p = int(top_k[row, 0]), float(top_p[row, 0])
        weights = np.exp(logits[row, order[:k]].astype(np.float64) - logits[row].max())
        before = np.concatenate([[0.0], np.cumsum(weights / weights.sum())[:-1]])
        kept = got[row, order] > -np.inf
        assert not kept[k:].any()
        assert (got[row][got[row] > -np.inf] == logits[row][got[row] > -np.inf]).all()
        if p == 1.0:
            assert kept[:k].all()
            continue
        clear = np.abs(before - p) > 1e-5
        assert (kept[:k] == (before < p))[clear].all()
        assert kept[0]


def test_same_keep_set_as_vllm():
    rng = np.random.default_rng(2)
    logits = rng.normal(scale=2.0, size=(6, 200)).astype(np.float32)
    top_k = np.array([1, 5, 200, 30, 200, 7], dtype=np.int32)
    top_p = np.array([0.9, 0.5, 0.7, 1.0, 1.0, 0.99], dtype=np.float32)
    for p in (top_p, None):
        expected = apply_top_k_top_p_pytorch(
            torch.from_numpy(logits.copy()),
            torch.from_numpy(top_k),
            None if p is None else torch.from_numpy(p),
        ).numpy()
        got = keep_top_k_top_p(mx.array(logits), top_k[:, None], None if p is None else p[:, None])
        assert (np.array(got) == expected).all()


def test_ties_with_the_last_kept_token_are_kept():
    logits = mx.array([[2.0, 1.0, 1.0, 1.0, 0.0]])
    got = keep_top_k_top_p(logits, np.array([[2]], dtype=np.int32))
    assert (np.array(got)[0] > -np.inf).tolist() == [True, True, True, True, False]


@given(seed=seeds, min_p=st.floats(0.0, 1.0))
def test_min_p_keeps_what_the_definition_keeps(seed, min_p):
    logits = np.random.default_rng(seed).normal(scale=3.0, size=(2, 60)).astype(np.float32)
    got = np.array(keep_min_p(mx.array(logits), mx.array([[min_p], [0.0]])))
    ratio = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    clear = np.abs(ratio[0] - min_p) > 1e-5 * ratio[0]
    assert ((got[0] > -np.inf) == (ratio[0] >= min_p))[clear].all()
    assert (got[1] == logits[1]).all()
