# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels' results with the references' in the same steps."""

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
    positions_of,
    rotation_of,
    score_scale,
    state_width,
)
from metal_kernels.selfcheck.steps import Step, contents, steps

_FLOAT_EPS = 2.0**-23
#: For a sine and a cosine together: `metal::fast` has them within 2^-13 (Metal Shading Language
#: Specification, 8.2) for small angles, and angles of some hundreds are 2^-15 apart themselves.
_ANGLE_ERROR = 2.0**-11
_SHORT_WINDOW = 40
_LARGEST = float(np.finfo(np.float32).max)  # replaces NaN and infinity, which JSON lacks
_CONTEXT_AXES = ("head", "request", "position", "element")
_POOL_AXES = ("head", "block", "offset", "element")


@dataclass(frozen=True)
class Finding:
    """The element of one comparison with the largest error relative to its tolerance."""

    error: float
    tolerance: float
    detail: str

    @property
    def share(self) -> float:
        """The error relative to the tolerance; above 1, the kernel is wrong."""
        return float(_share(np.array(self.error), np.array(self.tolerance)))


def findings(case: Case, check: Check, num_steps: int, tiles: Tiles) -> Iterator[Finding]:
    """Runs `num_steps` steps through the kernels; yields a finding for each compared array."""
    kernel = check.kernel
    if kernel == "gathered" and case.window is not None:  # so that steps reach beyond it
        case = replace(case, window=min(case.window, _SHORT_WINDOW))
    played = steps(case, kernel, num_steps)
    results, pool = play(case, check, played, tiles)
    with mx.stream(mx.cpu):  # MLX's CPU arithmetic is plain float32 on every machine
        wanted = contents(case, len(played[0].blocks_np))
        for index, (step, found) in enumerate(zip(played, results, strict=True)):
            slots = mx.array(step.layout.slot_mapping_np)
            wanted = write_reference.write(
                _expected_keys(case, kernel, step), step.values, slots, *wanted
            )
            if kernel == "kv_blocks":
                wanted = _move_blocks(wanted, step)
            if kernel == "kv_states":
                _move_states(wanted, step)
            mx.eval([array for array in wanted if array is not None])
            where = f"step {index // LAYERS}, layer {index % LAYERS}: "
            if kernel == "rotation":
                yield from _compare_rotated(where, case, step, found)
            elif kernel == "kv_gather":
                yield from _compare_contexts(where, case, step.layout, found, wanted)
            elif found:
                yield _compare_attention(where, case, step, found[0], wanted, kernel == "gathered")
        yield from _compare_pools(case, pool, wanted, _ANGLE_ERROR if kernel == "rotation" else 0.0)


def _expected_keys(case: Case, kernel: str, step: Step) -> mx.array:
    if kernel != "rotation":
        return step.keys
    return write_reference.rotate(step.keys, positions_of(step), rotation_of(case))


def _compare_rotated(
    where: str, case: Case, step: Step, found: list[mx.array]
) -> Iterator[Finding]:
    """Compares rotated queries, if any; tolerates a rounding and the error of the angles."""
    for array in found:
        rotated = write_reference.rotate(step.queries, positions_of(step), rotation_of(case))
        wanted = floats(rotated)
        largest = np.abs(floats(step.queries)).max()
        allowed = np.abs(wanted) * mx.finfo(case.dtype).eps + _ANGLE_ERROR * largest
        yield compare(f"{where}queries", ("row", "head", "element"), floats(array), wanted, allowed)


def _move_blocks(pools: Pools, step: Step) -> Pools:
    sources, targets, cleared = moves(step)

    def after(array: mx.array) -> mx.array:
        return blocks_reference.zero(blocks_reference.copy([array], sources, targets), cleared)[0]

    keys, *others = pools
    return Pools(after(keys), *(None if array is None else after(array) for array in others))


def _move_states(pools: Pools, step: Step) -> None:
    arrays, (sources, targets, _) = elements(pools), moves(step)
    states = states_reference.read(arrays, mx.array(sources), state_width(arrays))
    states_reference.write(arrays, targets, states)


def _compare_contexts(
    where: str, case: Case, layout: RaggedLayout, found: list[mx.array], wanted: Pools
) -> Iterator[Finding]:
    """Compares contexts: exactly, or within two float32 roundings if the cache has scales."""
    table = mx.array(layout.block_tables_np)
    for index, array in enumerate(found):
        pool, scales = wanted[index], wanted[2 + index]
        assert pool is not None  # the arrays found exist in the pool
        read = gather_reference.gather(pool, table, case.dtype, scales, bounds(layout))
        expected = floats(read)
        allowed = np.abs(expected) * (0.0 if scales is None else 2 * _FLOAT_EPS)
        yield compare(where + "KV"[index], _CONTEXT_AXES, floats(array), expected, allowed)


def _compare_attention(
    where: str, case: Case, step: Step, found: mx.array, pools: Pools, by_mlx: bool
) -> Finding:
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
        extent=case.extent,
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
        bias=step.bias,
    )
    wanted = floats(expected)
    # Tolerance: one unit in the last place of the output's dtype, and float32's rounding errors. A
    # score is a sum of D products of about 1/sqrt(D). Their roundings add up to at most some
    # sqrt(D) eps; exp2 and the division add a few eps, tanh adds one per unit of its cap. That is
    # the relative error of a weight, and so of the numerator and the denominator of a mean of V. A
    # bias is of that size, too.
    weight_error = _FLOAT_EPS * (math.sqrt(case.shape.head_size) + 8 + (case.softcap or 0.0))
    if by_mlx:
        # MLX's kernels may round scaled queries, and on matrix units weights, to the dtype's 16
        # bits, and float32 to 2^-11 (TF32, mlx#3897): a score of size 1 by about four such
        # roundings.
        weight_error += 4 * max(mx.finfo(case.dtype).eps / 2, 2.0**-11)
    largest_value = float(mx.abs(values).max())
    allowed = np.abs(wanted) * mx.finfo(case.dtype).eps + 2 * weight_error * largest_value
    return compare(f"{where}output", ("row", "head", "element"), floats(found), wanted, allowed)


def _compare_pools(
    case: Case, found: Pools, wanted: Pools, key_error: float = 0.0
) -> Iterator[Finding]:
    """Compares pools: exactly, except for quantized values close to a tie and rotated keys.

    int8: a quantized value may differ by one and a scale by its last bit, so a decoded value may
    differ by slightly more than a scale. fp8: kernel and reference may also choose different scales
    for a row. Each rounds an element by at most 1/16 of it, or by 2^-10 scales if it is subnormal.
    So the two decoded values differ by at most 1/8 of the value or, as one scale may be almost
    twice the other, 2^-8 scales.

    Rotated keys may differ by `key_error`, relative to the largest key, and by a rounding.
    """
    for part, index in (("K", 0), ("V", 1)):
        elements, pool, scales = found[index], wanted[index], wanted[2 + index]
        if elements is None or pool is None:
            continue
        expected = floats(gather_reference.decode(pool, scales))
        allowed = np.zeros_like(expected)
        if scales is not None and case.cache_dtype == mx.uint8:  # 3 bits of mantissa, at least 2^-9
            allowed = np.abs(expected) * (1 / 8 + 1 / 128) + floats(scales)[..., None] * 2.0**-8
        elif scales is not None:
            allowed = allowed + floats(scales)[..., None] * (1 + 2.0**-8)
        if key_error and part == "K":
            rounding = np.abs(expected) * mx.finfo(case.dtype).eps
            allowed = allowed + rounding + key_error * np.abs(expected).max()
        array = floats(gather_reference.decode(elements, found[2 + index]))
        yield compare(f"pool at the end: {part}", _POOL_AXES, array, expected, allowed)


def floats(array: mx.array) -> np.ndarray:
    """Converts an array to float32."""
    return np.array(array.astype(mx.float32))


def compare(
    where: str, axes: tuple[str, ...], found: np.ndarray, wanted: np.ndarray, allowed: np.ndarray
) -> Finding:
    """Finds the element, in arrays of one shape, with the largest error over its tolerance."""
    error = np.nan_to_num(np.abs(found - wanted), nan=_LARGEST, posinf=_LARGEST)
    share = _share(error, allowed)
    worst = np.unravel_index(np.argmax(share), share.shape)
    index = ", ".join(f"{axis} {at}" for axis, at in zip(axes, worst, strict=True))
    return Finding(
        error=float(error[worst]),
        tolerance=float(allowed[worst]),
        detail=f"{where} at {index} is {found[worst]:.6g}, expected {wanted[worst]:.6g} within "
        f"{allowed[worst]:.2g}; {np.mean(share > 1):.1%} of the elements are off",
    )


def _share(error: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    share = np.where(error > 0, np.inf, 0.0)
    return np.divide(error, allowed, out=share, where=allowed > 0, dtype=np.float64)
