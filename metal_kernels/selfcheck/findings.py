# SPDX-License-Identifier: Apache-2.0
"""Compares what the kernels computed with what the references compute in the same steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from metal_kernels.kv_blocks import reference as blocks_reference
from metal_kernels.kv_gather import reference as gather_reference
from metal_kernels.kv_states import reference as states_reference
from metal_kernels.kv_write import reference as write_reference
from metal_kernels.kv_write.reference import Pools
from metal_kernels.layout import RaggedLayout
from metal_kernels.paged_attention import Tiles, buckets
from metal_kernels.paged_attention import reference as attention_reference
from metal_kernels.selfcheck.case import Case, Check
from metal_kernels.selfcheck.play import (
    LAYERS,
    bounds,
    elements,
    moves,
    play,
    score_scale,
    state_width,
)
from metal_kernels.selfcheck.steps import Step, contents, steps

_FLOAT_EPS = 2.0**-23
_SHORT_WINDOW = 40
_LARGEST = float(np.finfo(np.float32).max)  # for NaN and infinity, which JSON has not
_CONTEXT_AXES = ("head", "request", "position", "element")
_POOL_AXES = ("head", "block", "offset", "element")


@dataclass(frozen=True)
class Finding:
    """The element of one comparison whose error is the largest share of its tolerance."""

    error: float
    tolerance: float
    detail: str

    @property
    def share(self) -> float:
        """The error as a share of the tolerance; above 1 the kernel is wrong."""
        return float(_share(np.array(self.error), np.array(self.tolerance)))


def findings(case: Case, check: Check, num_steps: int, tiles: Tiles) -> Iterator[Finding]:
    """Plays `num_steps` steps by the kernels; yields a finding for each array compared."""
    kernel = check.kernel
    if kernel == "gathered" and case.window is not None:  # so that steps reach beyond it
        case = replace(case, window=min(case.window, _SHORT_WINDOW))
    played = steps(case, kernel, num_steps)
    results, pool = play(case, check, played, tiles)
    with mx.stream(mx.cpu):  # where MLX's own arithmetic is plain float32 on every machine
        wanted = contents(case, len(played[0].blocks_np))
        for index, (step, found) in enumerate(zip(played, results, strict=True)):
            slots = mx.array(step.layout.slot_mapping_np)
            wanted = write_reference.write(step.keys, step.values, slots, *wanted)
            if kernel == "kv_blocks":
                wanted = _moved(wanted, step)
            if kernel == "kv_states":
                _move_states(wanted, step)
            mx.eval([array for array in wanted if array is not None])
            where = f"step {index // LAYERS}, layer {index % LAYERS}: "
            if kernel == "kv_gather":
                yield from _compare_contexts(where, case, step.layout, found, wanted)
            elif found:
                yield _compare_attention(where, case, step, found[0], wanted, kernel == "gathered")
        yield from _compare_pools(case, pool, wanted)


def _moved(pools: Pools, step: Step) -> Pools:
    sources, targets, cleared = moves(step)

    def after(array: mx.array) -> mx.array:
        return blocks_reference.zero(blocks_reference.copy([array], sources, targets), cleared)[0]

    keys, *others = pools
    return Pools(after(keys), *(None if array is None else after(array) for array in others))


def _move_states(pools: Pools, step: Step) -> None:
    """In place."""
    arrays, (sources, targets, _) = elements(pools), moves(step)
    states = states_reference.read(arrays, mx.array(sources), state_width(arrays))
    states_reference.write(arrays, targets, states)


def _compare_contexts(
    where: str, case: Case, layout: RaggedLayout, found: list[mx.array], wanted: Pools
) -> Iterator[Finding]:
    """Contexts must be exact; where the cache has scales, within two float32 roundings."""
    table = mx.array(layout.block_tables_np)
    for index, array in enumerate(found):
        pool, scales = wanted[index], wanted[2 + index]
        assert pool is not None  # found what there is
        read = gather_reference.gather(pool, table, case.dtype, scales, bounds(layout))
        expected = floats(read)
        allowed = np.abs(expected) * (0.0 if scales is None else 2 * _FLOAT_EPS)
        yield compare(where + "KV"[index], _CONTEXT_AXES, floats(array), expected, allowed)


def _compare_attention(
    where: str, case: Case, step: Step, found: mx.array, pools: Pools, by_mlx: bool
) -> Finding:
    """Tolerance: one unit in the last place of the output's dtype, and float32's rounding errors.

    A score is a sum of D products of about 1/sqrt(D). Their roundings add up to some sqrt(D) eps at
    worst; exp2 and the division add a few eps, tanh adds one for each unit of its cap. That is the
    relative error of a weight, and so of the numerator and the denominator of a mean of V.

    MLX's kernels may round scaled queries, and on matrix units weights, to 16 bits of the dtype,
    and float32 to 2^-11 (TF32, mlx#3897): a score of size 1 by some four such roundings.
    """
    layout = step.layout
    keys = gather_reference.decode(pools.keys, pools.key_scales)
    if pools.values is None:
        values = keys[..., : case.shape.value_size]
    else:
        values = gather_reference.decode(pools.values, pools.value_scales)
    plan = buckets.plan(
        layout.query_start_loc_np,
        layout.seq_lens_np,
        layout.block_tables_np,
        layout.slot_mapping_np,
        layout.block_size,
        case.window,
    )
    expected = attention_reference.run(
        plan,
        step.queries.astype(mx.float32),
        None,
        None,
        keys,
        values,
        scale=score_scale(case),
        sinks=step.sinks,
        softcap=case.softcap,
        fused=False,
    )
    wanted = floats(expected)
    weight_error = _FLOAT_EPS * (math.sqrt(case.shape.head_size) + 8 + (case.softcap or 0.0))
    if by_mlx:
        weight_error += 4 * max(mx.finfo(case.dtype).eps / 2, 2.0**-11)
    largest_value = float(mx.abs(values).max())
    allowed = np.abs(wanted) * mx.finfo(case.dtype).eps + 2 * weight_error * largest_value
    return compare(f"{where}output", ("row", "head", "element"), floats(found), wanted, allowed)


def _compare_pools(case: Case, found: Pools, wanted: Pools) -> Iterator[Finding]:
    """A pool of values must be exact. In a pool of codes, quotients close to a tie may round apart.

    int8: a code may differ by one and a scale by its last bit, so a value by a little over a scale.
    fp8: kernel and reference may also choose different scales for a row. Each stores a value within
    half a step of the element, which is 1/16 of it, or 2^-10 scales if subnormal. So the two differ
    by 1/8 of the value or, as one scale may be almost twice the other, by 2^-8 scales.
    """
    for part, index in (("K", 0), ("V", 1)):
        elements, pool, scales = found[index], wanted[index], wanted[2 + index]
        if elements is None or pool is None:
            continue
        expected = floats(gather_reference.decode(pool, scales))
        allowed = np.zeros_like(expected)
        if scales is not None and case.cache_dtype == mx.uint8:  # 3 bits of mantissa, 2^-9 at least
            allowed = np.abs(expected) * (1 / 8 + 1 / 128) + floats(scales)[..., None] * 2.0**-8
        elif scales is not None:
            allowed = allowed + floats(scales)[..., None] * (1 + 2.0**-8)
        array = floats(gather_reference.decode(elements, found[2 + index]))
        yield compare(f"pool at the end: {part}", _POOL_AXES, array, expected, allowed)


def floats(array: mx.array) -> np.ndarray:
    """An array in float32."""
    return np.array(array.astype(mx.float32))


def compare(
    where: str, axes: tuple[str, ...], found: np.ndarray, wanted: np.ndarray, allowed: np.ndarray
) -> Finding:
    """The element of these arrays, all of one shape, that is nearest to what is allowed it."""
    error = np.nan_to_num(np.abs(found - wanted), nan=_LARGEST, posinf=_LARGEST)
    share = _share(error, allowed)
    place = np.unravel_index(np.argmax(share), share.shape)
    index = ", ".join(f"{axis} {at}" for axis, at in zip(axes, place, strict=True))
    return Finding(
        error=float(error[place]),
        tolerance=float(allowed[place]),
        detail=f"{where} at {index} is {found[place]:.6g}, expected {wanted[place]:.6g} within "
        f"{allowed[place]:.2g}; {np.mean(share > 1):.1%} of the elements are off",
    )


def _share(error: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    share = np.where(error > 0, np.inf, 0.0)
    return np.divide(error, allowed, out=share, where=allowed > 0, dtype=np.float64)
