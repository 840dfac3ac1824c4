# SPDX-License-Identifier: Apache-2.0
"""Tokens of a drafted block from its hidden states: argmax, DFlash2's selector, DSpark's chain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

#: Logits that share a maximum in the search for the largest: of some 200k by 16, the square root.
_CHUNK = 128


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """[..., count] values and int32 places of the largest of [..., V], in no order.

    In two stages, for MLX sorts all that it is to partition: only as many chunks as elements are
    wanted can hold any of these, those with the largest maxima.
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
        """The drafts, and what they were chosen by.

        Args:
            hidden: [R, K, H] normed states of the rows that draft.
            logits: [R, K, V], in the dtype of the head.
            anchors: [R] int32, each block's newest token.

        Returns:
            [R, K] int32 places in the head's vocabulary, and [R, K, C] scores of the candidates.
        """


class ArgmaxHead(BlockHead):
    """Each place's likeliest token."""

    def choose(
        self, hidden: mx.array, logits: mx.array, anchors: mx.array
    ) -> tuple[mx.array, mx.array]:
        return mx.argmax(logits, axis=-1).astype(mx.int32), logits


class SelectorHead(BlockHead):
    """Of each place's likeliest tokens the one that goes best with the token before (DFlash2)."""

    def __init__(self, selector: Any, transform: Callable[[mx.array], mx.array]) -> None:
        """
        Args:
            selector: mlx-vlm's CandidateSelector, whose own walk sorts the whole vocabulary.
            transform: of logits, monotonic.
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
    """Each place's likeliest token, given the one before it (DSpark)."""

    def __init__(self, markov: Any, scale: float, top_k: int | None, d2t: mx.array | None) -> None:
        """
        Args:
            markov: mlx-vlm's VanillaMarkov.
            scale: factor on its logits.
            top_k: tokens that it corrects, of each place; None: all.
            d2t: see BlockDrafter; the chain follows the target's numbers.
        """
        self._markov, self._factor, self._top_k, self._d2t = markov, scale, top_k, d2t

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
            scores.append(logits[:, place] + bias * self._factor)
            found = mx.argmax(scores[-1], axis=-1, keepdims=True).astype(mx.int32)
            if candidates is not None:
                found = mx.take_along_axis(candidates[:, place], found, axis=-1)
            chosen.append(found[:, 0])
            before = chosen[-1] if self._d2t is None else chosen[-1] + self._d2t[chosen[-1]]
        return mx.stack(chosen, axis=1), mx.stack(scores, axis=1)


def rows_of(linear: nn.Module, places: mx.array) -> mx.array:
    """[..., in] rows of a linear layer's weight, which may be quantized."""
    if "scales" not in linear:
        return linear.weight[places]
    biases = linear.biases[places] if "biases" in linear else None
    packed = linear.weight[places], linear.scales[places], biases
    rows: mx.array = mx.dequantize(
        *packed, group_size=linear.group_size, bits=linear.bits, mode=linear.mode
    )
    return rows
