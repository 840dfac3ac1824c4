# SPDX-License-Identifier: Apache-2.0
"""Draws tokens with one random key per row, so that a row's noise depends only on its key."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.engine.sample.stage import RequestParameters, Step, is_random

_ALL_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
#: mx.random.uniform returns multiples of about 2^-32. An exact zero is moved to half a step: there
#: the Gumbel noise is 22.9 instead of +inf, which would win for any logits.
_SMALLEST_UNIFORM = 2.0**-33


class RandomSampling(RequestParameters):
    """Draws the tokens of random requests; keeps their seeds.

    A seeded request's key is a function of (seed, number of output tokens) only: it draws the same
    tokens alone, in any batch, and after preemption. Other rows take keys from the engine's
    generator, which starts with `seed`.
    """

    def __init__(self, max_num_reqs: int, seed: int) -> None:
        self._generator = np.random.default_rng(seed & _ALL_64_BITS)
        self._seeds = np.zeros(max_num_reqs, dtype=np.uint64)
        self._seeded = np.zeros(max_num_reqs, dtype=np.bool_)

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        random = is_random(params)
        self._seeded[req_idx] = random and params.seed is not None
        self._seeds[req_idx] = (params.seed or 0) & _ALL_64_BITS
        return random

    def remove_request(self, req_idx: int) -> None:
        self._seeded[req_idx] = False

    def heaviest(self) -> dict[str, Any]:
        return {"seed": 0}

    def sample(self, logits: mx.array, step: Step) -> mx.array:
        """Draws int32 [N]: random requests' rows from float32 [N, V] logits, others by argmax."""
        random = step.mask_using(self)
        scale = None if random.all() else random.astype(np.float32)[:, None]
        return draw(logits, self._keys(step), scale)

    def _keys(self, step: Step) -> np.ndarray | mx.array:
        num_rows = len(step.req_indices)
        seeded = self._seeded[step.req_indices]
        if not seeded.any():
            return self._unseeded(num_rows)
        if step.lag is None:
            keys = _seeded(self._seeds[step.req_indices], step.num_output_tokens)
            if not seeded.all():
                keys[~seeded] = self._unseeded(num_rows - int(seeded.sum()))
            return keys
        # Keys for every possible count; the device picks the right one.
        # The keys of every count that there may be; the device picks the right one.
        width = 1 + int(step.lag.most_np.max())
        counts = np.maximum(step.num_output_tokens[:, None] - np.arange(width), 0)
        seeds = np.repeat(self._seeds[step.req_indices], width)
        keys = _seeded(seeds, counts.ravel()).reshape(num_rows, width, 2)
        if not seeded.all():
            keys[~seeded] = self._unseeded(num_rows - int(seeded.sum()))[:, None]
        return mx.array(keys)[mx.arange(num_rows), step.lag.counts]

    def _unseeded(self, num_rows: int) -> np.ndarray:
        return self._generator.integers(0, 2**32, size=(num_rows, 2), dtype=np.uint32)


def draw(
    logits: mx.array, keys: np.ndarray | mx.array, noise_scale: np.ndarray | None = None
) -> mx.array:
    """Draws one token per row from softmax(logits), by the Gumbel-max trick: argmax(logits +
    gumbel).

    logits: float32 [N, V]. keys: uint32 [N, 2]. noise_scale: float32 [N, 1], 1 draws and 0 takes
    the argmax; None draws every row.
    """
    noise = _gumbel(mx.array(keys), logits.shape[1])
    if noise_scale is not None:
        noise = noise * mx.array(noise_scale)
    return mx.argmax(logits + noise, axis=-1).astype(mx.int32)


def _gumbel(keys: mx.array, width: int) -> mx.array:
    """Returns standard Gumbel noise, float32 [N, width], always finite."""
    # -log(E) with E = -log(1 - u) exponential. Large noise comes from small u, where floats are
    # dense; the usual -log(-log(u)) takes it from u near 1, in steps of 2^-24, and distorts the
    # draw of rare tokens. uniform() stops at 1 - 2^-24, so E is at most 16.6.
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(width,), key=key))(keys)
    return -mx.log(-mx.log1p(-mx.maximum(uniform, _SMALLEST_UNIFORM)))


def _seeded(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns uint32 [N, 2] keys from uint64 seeds [N] and token counts [N]."""
    mixed = _mix(_mix(seeds) ^ counts.astype(np.uint64))
    return np.ascontiguousarray(mixed).view(np.uint32).reshape(-1, 2)


def _mix(x: np.ndarray) -> np.ndarray:
    # The output function of SplitMix64 (Steele, Lea, Flood: Fast splittable PRNGs, 2014).
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
