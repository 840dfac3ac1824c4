# SPDX-License-Identifier: Apache-2.0
"""Computes masks and penalties on [N, V] logits, including top-k and top-p; removed tokens get
-inf.

Row parameters are [N, 1] arrays. Logits are float32, except where a docstring says any float.
"""

import mlx.core as mx
import numpy as np

NEG_INF = -float("inf")
_BITS = 32


def pack_allowed(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns an int32 [ceil(V/32)] bit mask of token_ids (int [A]) for `apply_bitmask`."""
    words = np.zeros((vocab_size + _BITS - 1) // _BITS, dtype=np.uint32)
    ids = token_ids.astype(np.int64)
    bits = np.left_shift(np.uint32(1), (ids % _BITS).astype(np.uint32))
    np.bitwise_or.at(words, ids // _BITS, bits)
    return words.view(np.int32)


def apply_bitmask(logits: mx.array, rows: np.ndarray, bitmask: np.ndarray) -> mx.array:
    """Removes the tokens whose bit is clear from `rows`; other rows are untouched.

    logits: any float [N, V]. rows: int32 [M], row indices. bitmask: int32 [M, ceil(V/32)]; bit v %
    32 of word v // 32 set means token v is allowed.
    """
    num_rows, vocab_size = logits.shape
    words = mx.array(np.ascontiguousarray(bitmask)).view(mx.uint32)
    if len(rows) != num_rows or not np.array_equal(rows, np.arange(num_rows)):
        # One extra all-ones row serves every row that has no mask of its own.
        source = np.full(num_rows, len(rows), dtype=np.int32)
        source[rows] = np.arange(len(rows), dtype=np.int32)
        everything = mx.full((1, words.shape[1]), 0xFFFF_FFFF, dtype=mx.uint32)
        words = mx.concatenate([words, everything])[mx.array(source)]
    shifts = mx.arange(_BITS, dtype=mx.uint32)
    allowed = mx.bitwise_and(mx.right_shift(words[:, :, None], shifts), 1).astype(mx.bool_)
    allowed = allowed.reshape(num_rows, -1)[:, :vocab_size]
    return mx.where(allowed, logits, mx.array(NEG_INF, dtype=logits.dtype))


def add_at(
    logits: mx.array, rows: np.ndarray, token_ids: np.ndarray, values: np.ndarray | mx.array | float
) -> mx.array:
    """Computes logits[rows[i], token_ids[i]] += values[i]; adding -inf removes a token.

    rows, token_ids: int32 [E]. values: float32 [E], or one number for all.
    """
    if len(rows) == 0:
        return logits
    updates = mx.array(values, dtype=logits.dtype)
    return logits.at[mx.array(rows), mx.array(token_ids)].add(updates)


def penalise(
    logits: mx.array,
    seen: mx.array,
    output_counts: mx.array,
    repetition: mx.array,
    frequency: mx.array,
    presence: mx.array,
) -> mx.array:
    """Applies repetition, frequency and presence penalties.

    seen: bool [N, V], token occurs in the prompt or the output. output_counts: int32 [N, V].
    """
    # Repetition divides a positive logit and multiplies a negative one (CTRL, arXiv:1909.05858,
    # section 4.1, with the sign rule every server uses); frequency and presence subtract `frequency
    # * count + presence * [count > 0]` (OpenAI API reference).
    scaled = mx.where(logits > 0, logits / repetition, logits * repetition)
    logits = mx.where(seen, scaled, logits)
    return logits - frequency * output_counts - presence * (output_counts > 0)


def keep_min_p(logits: mx.array, min_p: mx.array) -> mx.array:
    """Keeps tokens whose probability is at least min_p times the largest (arXiv:2407.01082)."""
    # Compared as logits: p >= min_p * p_max is l >= l_max + log(min_p), so no softmax is needed and
    # min_p = 0 keeps everything.
    threshold = logits.max(axis=-1, keepdims=True) + mx.log(min_p)
    return mx.where(logits >= threshold, logits, NEG_INF)


def keep_top_k_top_p(
    logits: mx.array, top_k: np.ndarray, top_p: np.ndarray | None = None
) -> mx.array:
    """Keeps the top_k largest logits, then the smallest set of those with mass >= top_p.

    top_k: int32 [N, 1] in [1, V]; V keeps all. top_p: float32 [N, 1] in (0, 1], or None when no row
    uses it. Top-p (arXiv:1904.09751) sees the distribution renormalized after top-k.
    """
    vocab_size = logits.shape[1]
    width = int(top_k.max())
    # A row without top-k needs all logits in order. Otherwise the head is enough: on the CPU
    # backend topk(50) of [16, 150000] takes 27 ms and sort 244 ms.
    head = mx.topk(logits, width, axis=-1) if width < vocab_size else logits
    head = -mx.sort(-head, axis=-1)
    if top_p is None:
        last = mx.array(top_k - 1)
    else:
        rank = mx.arange(width)
        probs = mx.softmax(mx.where(rank < mx.array(top_k), head, NEG_INF), axis=-1)
        mass_before = mx.cumsum(probs, axis=-1, inclusive=False)
        # A token stays if the tokens before it have not reached top_p. 1.0 must keep all, and
        # float32 sums reach 1.0 early; no mass reaches 2.0.
        bound = mx.array(np.where(top_p < 1.0, top_p, np.float32(2.0)))
        num_kept = (mass_before < bound).sum(axis=-1, keepdims=True)
        last = mx.minimum(num_kept, mx.array(top_k)) - 1
    threshold = mx.take_along_axis(head, last, axis=-1)
    # Compare by value, so tokens tied with the last kept one stay: a sort's tie order has no
    # effect.
    return mx.where(logits >= threshold, logits, NEG_INF)
