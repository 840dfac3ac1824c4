# SPDX-License-Identifier: Apache-2.0
"""Convolution over sequences in MLX's operations, once per layer, by a ReferencePlan."""

import mlx.core as mx

from metal_kernels.sequence_groups import ReferencePlan


def run(
    plan: ReferencePlan,
    inputs: mx.array,
    kept: mx.array | None,
    weight: mx.array,
    bias: mx.array | None,
    states: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Computes a causal convolution of each channel through all sequences of a step.

    Args:
        plan: plan of the step.
        inputs: [T, C] floats.
        kept: [P', C] inputs kept by the previous step; None: none.
        weight: [C, K], or MLX's [C, K, 1], oldest input first.
        bias: [C].
        states: [N, K-1, C], newest inputs before the kept ones, oldest first.

    Returns:
        [T, C] outputs, [E, K-1, C] states in their dtype, and [num_kept, C] drafts' inputs.

    Raises:
        ValueError: the plan was made for a smaller K, or for another number of kept rows.
    """
    num_channels, num_taps = weight.shape[:2]
    num_kept_before = 0 if kept is None else len(kept)
    planned = plan.taps.shape[1]
    if num_taps > planned:
        raise ValueError(f"a convolution has {num_taps} taps; at most {planned} are planned")
    if num_kept_before != plan.num_kept_before:
        raise ValueError(f"{num_kept_before} kept rows, planned were {plan.num_kept_before}")
    dtype = inputs.dtype
    newest_first = states[:, ::-1].swapaxes(0, 1).reshape(-1, num_channels).astype(dtype)
    rows = [inputs] if kept is None else [inputs, kept.astype(dtype)]
    source = mx.concatenate([*rows, mx.zeros((1, num_channels), dtype), newest_first])
    scale = weight.reshape(num_channels, num_taps).T.astype(mx.float32)
    taps = plan.taps[:, planned - num_taps :]
    taken = (mx.take(source, taps, axis=0) * scale).sum(1)
    if plan.heads is None:
        out = taken
    else:
        # Shifts are faster than an indexed read; only the rows at sequence heads need the latter.
        out = _along(inputs, mx.contiguous(scale))
        out[plan.heads] = taken
    out = (out if bias is None else out + bias).astype(dtype)
    ended = mx.take(source, plan.end_taps[:, planned - num_taps + 1 :], axis=0)
    drafts = mx.take(source, plan.keep, axis=0)
    return out, ended.astype(states.dtype), drafts


@mx.compile
def _along(inputs: mx.array, scale: mx.array) -> mx.array:
    """Convolves [T, C] rows as one zero-padded sequence; scale: [K, C] float32, oldest first."""
    num_rows, num_taps = len(inputs), len(scale)
    padded = mx.pad(inputs, [(num_taps - 1, 0), (0, 0)])
    out = padded[:num_rows] * scale[0]
    for tap in range(1, num_taps):
        out = out + padded[tap : tap + num_rows] * scale[tap]
    return out
