# SPDX-License-Identifier: Apache-2.0
"""Attention by MLX, over contexts gathered from the pool, for requests for which it is faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from metal_kernels.op_common import merged
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import buckets, prompts
from metal_kernels.paged_attention import gathered as by_gathering
from metal_kernels.paged_attention.buckets import BucketPlan
from metal_kernels.paged_attention.prompts import PromptPlan
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVArray
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.patches.mlx_patches.seam import Scoring

#: More tokens than any request has in a step.
_NEVER = 2**30


@dataclass(frozen=True)
class ByMLX:
    """Selects the requests of a step that MLX's attention serves, for one kind of layer."""

    decodes: bool = False  # requests with at most buckets.DECODE_ROWS tokens in the step
    #: Maps a timed context length to the fewest tokens of a request that MLX serves; None: never.
    #: Other lengths use the nearest timed one, by ratio. Empty: MLX serves no prompts.
    prompts: Mapping[int, int | None] = field(default_factory=dict)
    force_fused: bool | None = None  # see `prompts.plan`

    def __bool__(self) -> bool:
        return self.decodes or self.fewest_rows is not None

    @property
    def fewest_rows(self) -> int | None:
        """Fewest tokens of a prompt that MLX serves; None: it serves no prompts."""
        return min((rows for rows in self.prompts.values() if rows is not None), default=None)

    def serves(self, num_rows_np: np.ndarray, seq_lens_np: np.ndarray) -> np.ndarray:
        """Returns [R] bool, the requests that MLX serves.

        Args:
            num_rows_np: [R] int32, tokens of each request in the step.
            seq_lens_np: [R] int32, context lengths.
        """
        found = (num_rows_np <= buckets.DECODE_ROWS) & self.decodes
        if self.fewest_rows is None:
            return found
        contexts = sorted(self.prompts)
        fewest_np = np.array([self.prompts[context] or _NEVER for context in contexts])
        between = np.sqrt(np.array(contexts[:-1], np.float64) * np.array(contexts[1:]))
        fewest_np = fewest_np[np.searchsorted(between, seq_lens_np)]
        return found | (num_rows_np >= np.maximum(fewest_np, buckets.DECODE_ROWS + 1))


@dataclass(frozen=True)
class GatheredPlan:
    """Plan for the tokens of a step that MLX's attention serves."""

    decodes: BucketPlan | None
    prompts: PromptPlan | None
    rows: mx.array | None  # [G] int32, tokens of decodes, then of prompts; None: all, in order
    others: mx.array | None  # [T - G] int32, tokens that the kernels serve; None: none
    order: mx.array | None  # [T] int32, index of each token in `others` + `rows`; None: identity

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in (self.decodes, self.prompts) if part is not None)

    def work(self, kind: AttentionKind) -> int:
        """FLOPs per layer."""
        shape = kind.shape
        sizes = shape.head_size + shape.value_size
        decodes = () if self.decodes is None else self.decodes.buckets
        work = sum(bucket.work(shape.num_heads, sizes) for bucket in decodes)
        return work + (0 if self.prompts is None else self.prompts.work)


def select(layout: StepLayout, by_mlx: ByMLX) -> np.ndarray:
    """Returns [R] bool, the requests that MLX's attention serves.

    Excludes requests whose lengths only the device knows: masks and bounds are made on the host.
    """
    requests = by_mlx.serves(np.diff(layout.query_start_loc_np), layout.seq_lens_np)
    if layout.lag is not None:
        requests &= layout.lag.most_np == 0
    return requests


def plan(
    layout: StepLayout,
    requests: np.ndarray,
    kind: AttentionKind,
    force_fused: bool | None = None,
) -> GatheredPlan:
    """Plans the step for the requests that MLX's attention serves: [R] bool, at least one True.

    `force_fused`: see `prompts.plan`.
    """
    decodes = requests & (np.diff(layout.query_start_loc_np) <= buckets.DECODE_ROWS)
    of_decodes, of_prompts = None, None
    if decodes.any():
        starts, lens, tables = layout.arrays_without(~decodes)
        no_slots = np.full(starts[-1], -1, np.int32)  # K/V of the step are in the pool already
        of_decodes = buckets.plan(
            *(starts, lens, tables, no_slots, layout.block_size, kind.window), bounded=True
        )
    if (longer := requests & ~decodes).any():
        some = layout.arrays_without(~longer)
        placed = layout.block_size, kind.shape, kind.window
        of_prompts = prompts.plan(*some, *placed, force_fused=force_fused)
    groups = [layout.rows_of(group) for group in (~requests, decodes, longer)]
    order = np.argsort(np.concatenate(groups)).astype(np.int32)
    in_order = bool((order == np.arange(len(order))).all())
    others, *ours = groups
    return GatheredPlan(
        of_decodes,
        of_prompts,
        None if in_order and not len(others) else mx.array(np.concatenate(ours)),
        mx.array(others) if len(others) else None,
        None if in_order else mx.array(order),
    )


def run(
    plan: GatheredPlan,
    queries: mx.array,
    keys: KVArray,
    values: KVArray,
    after: mx.array,
    scoring: Scoring,
    pace: Pace | None,
) -> tuple[list[mx.array], list[mx.array]]:
    """Computes attention for the plan's tokens.

    Args:
        queries: [G, H, D], the plan's `rows`.
        keys, values: the pool's; for MLA latents both are the keys.
        after: fence of the last write.

    Returns:
        Outputs that concatenate to [G, H, DV], and a fence of all reads.
    """
    scale, sinks, softcap, _ = scoring  # `by_mlx` has no layers with a bias
    pools = keys.elements, values.elements, after, scale
    scales = keys.scales, values.scales, pace
    outputs: list[mx.array] = []
    fences: list[mx.array] = []
    first = 0
    if plan.decodes is not None:
        first = plan.decodes.num_tokens
        some = queries[:first]
        out, reads = by_gathering.run(plan.decodes, some, *pools, softcap, sinks, *scales)
        outputs.append(out)
        fences += reads
    if plan.prompts is not None:
        out, reads = prompts.run(plan.prompts, queries[first:], *pools, softcap, sinks, *scales)
        outputs.append(out)
        fences += reads
    return outputs, [merged(fences)]


def as_rows(pool: KVArray, read_slots: mx.array) -> tuple[mx.array, mx.array | None, mx.array]:
    """Views K or V of all heads as blocks of one token in one head, for `kv_gather`.

    read_slots: [n, C, k] int32, C / Hkv of each head in turn; negative ones are absent.

    Returns:
        [1, Hkv * slots, 1, D] elements, their scales, and [n, C * k] slots in them.
    """
    num_heads, num_blocks, block_size, size = pool.elements.shape
    if num_heads > 1:
        num_choices = read_slots.shape[1]
        heads = mx.arange(num_choices, dtype=mx.int32) * num_heads // num_choices
        first = heads[:, None] * (num_blocks * block_size)
        read_slots = mx.where(read_slots < 0, read_slots, read_slots + first)
    scales = None if pool.scales is None else pool.scales.reshape(1, -1, 1)
    return pool.elements.reshape(1, -1, 1, size), scales, read_slots.flatten(1)
