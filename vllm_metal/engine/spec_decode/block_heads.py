# SPDX-License-Identifier: Apache-2.0
"""Chooses a drafted block's tokens: by argmax, DFlash2's selector or DSpark's Markov chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

#: Logits that share a maximum in the search for the largest: of some 200k by 16, the square root.
_CHUNK = 128


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of [..., V] along the last axis: values and int32 indices, unordered.

    Works in two stages, since MLX sorts everything that it partitions: only the `count` chunks with
    the largest maxima can hold any of these elements.
    """
    size = logits.shape[-1]
    if size <= count * _CHUNK:
        places = mx.argpartition(logits, -count, axis=-1)[..., -count:]
        return mx.take_along_axis(logits, places, axis=-1), places.astype(mx.int32)
    missing = -size % _CHUNK
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    padded = mx.pad(logits, padding, constant_values=-mx.inf) if missing else logits
    chunks = padded.reshape(*logits.shape[:-1], -1, _CHUNK)
    taken = mx.argpartition(chunks.max(axis=-1), -count, axis=-1)[..., -count:]
    found = mx.take_along_axis(chunks, taken[..., None], axis=-2).flatten(-2, -1)
    places = mx.argpartition(found, -count, axis=-1)[..., -count:]
    values = mx.take_along_axis(found, places, axis=-1)
    chunk = mx.take_along_axis(taken, places // _CHUNK, axis=-1)
    return values, (chunk * _CHUNK + places % _CHUNK).astype(mx.int32)


class BlockHead(ABC):
    """Chooses the drafts of R blocks."""

    @abstractmethod
    def choose(
        self, hidden: mx.array, logits: mx.array, anchors: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Chooses the drafts, and returns the scores that they were chosen by.

        Args:
            hidden: [R, K, H] normed hidden states of the drafted positions.
            logits: [R, K, V], in the dtype of the head.
            anchors: [R] int32, each block's newest token.

        Returns:
            [R, K] int32 indices in the head's vocabulary, and [R, K, C] scores of the candidates.
        """


class ArgmaxHead(BlockHead):
    """Chooses the likeliest token of each position."""

    def choose(
        self, hidden: mx.array, logits: mx.array, anchors: mx.array
    ) -> tuple[mx.array, mx.array]:
        return mx.argmax(logits, axis=-1).astype(mx.int32), logits


class SelectorHead(BlockHead):
    """Chooses, of each position's top tokens, the best one after the token before it (DFlash2)."""

    def __init__(self, selector: Any, transform: Callable[[mx.array], mx.array]) -> None:
        """
        Args:
            selector: mlx-vlm's CandidateSelector, whose own method sorts the whole vocabulary.
            transform: applied to logits; monotonic.
        """
        self._codebooks, self._transform = selector, transform

    def choose(
        self, hidden: mx.array, logits: mx.array, anchors: mx.array
    ) -> tuple[mx.array, mx.array]:
        selector = self._codebooks
        values, candidates = largest(logits, selector.top_k)  # [R, K, C]
        values = self._transform(values)
        states = selector.hidden_projection(hidden)
        successors = selector.successor_codebook(candidates)
        before, chosen, scores = anchors, [], []
        for place in range(hidden.shape[1]):
            edge = selector.predecessor_codebook(before) * states[:, place]  # [R, rank]
            pairs = (successors[:, place] @ edge[..., None])[..., 0]
            scores.append(values[:, place] + pairs)
            best = mx.argmax(scores[-1], axis=-1, keepdims=True)
            before = mx.take_along_axis(candidates[:, place], best, axis=-1)[:, 0]
            chosen.append(before)
        return mx.stack(chosen, axis=1), mx.stack(scores, axis=1)


class MarkovHead(BlockHead):
    """Chooses each position's likeliest token given the token before it (DSpark)."""

    def __init__(
        self,
        markov: Any,
        transform: Callable[[mx.array], mx.array],
        top_k: int | None,
        d2t: mx.array | None,
    ) -> None:
        """
        Args:
            markov: mlx-vlm's VanillaMarkov.
            transform: applied to the Markov logits.
            top_k: number of tokens that the Markov logits correct at each position; None: all.
            d2t: see BlockDrafter; the chain uses the target's token ids.
        """
        self._markov, self._transform, self._top_k, self._d2t = markov, transform, top_k, d2t

    def choose(
        self, hidden: mx.array, logits: mx.array, anchors: mx.array
    ) -> tuple[mx.array, mx.array]:
        candidates = None
        if self._top_k is not None:
            logits, candidates = largest(logits, self._top_k)
        before, chosen, scores = anchors, [], []
        for place in range(hidden.shape[1]):
            embedded = self._markov.get_prev_embeddings(before)
            if candidates is None:
                bias = self._markov.markov_w2(embedded)
            else:
                weights = rows_of(self._markov.markov_w2, candidates[:, place])  # [R, C, rank]
                bias = (weights @ embedded[..., None])[..., 0]
            scores.append(logits[:, place] + self._transform(bias))
            found = mx.argmax(scores[-1], axis=-1, keepdims=True).astype(mx.int32)
            if candidates is not None:
                found = mx.take_along_axis(candidates[:, place], found, axis=-1)
            chosen.append(found[:, 0])
            before = chosen[-1] if self._d2t is None else chosen[-1] + self._d2t[chosen[-1]]
        return mx.stack(chosen, axis=1), mx.stack(scores, axis=1)


def rows_of(linear: nn.Module, places: mx.array) -> mx.array:
    """Gathers [..., in] rows of a linear layer's weight, which may be quantized."""
    if "scales" not in linear:
        return linear.weight[places]
    biases = linear.biases[places] if "biases" in linear else None
    packed = linear.weight[places], linear.scales[places], biases
    rows: mx.array = mx.dequantize(
        *packed, group_size=linear.group_size, bits=linear.bits, mode=linear.mode
    )
    return rows
