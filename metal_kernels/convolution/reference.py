# SPDX-License-Identifier: Apache-2.0
"""Convolution over sequences in MLX's operations: run() once a layer, by a ReferencePlan."""

import mlx.core as mx

from metal_kernels.sequence_groups import ReferencePlan

#: Rows whose K inputs are gathered at once: a few megabytes, which a cache holds.
_TILE = 64


def run(
    plan: ReferencePlan,
    inputs: mx.array,
    kept: mx.array | None,
    weight: mx.array,
    bias: mx.array | None,
    states: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Computes a causal convolution of each channel alone, through all sequences of a step.

    Args:
        plan: of the step.
        inputs: [T, C], float.
        kept: [P', C], inputs kept by the step before; None: it kept nothing.
        weight: [C, K], or [C, K, 1] as MLX has it, oldest input first.
        bias: [C].
        states: [N, K-1, C], newest inputs before the kept ones, oldest first.

    Returns:
        [T, C]; [E, K-1, C] states of the dtype they had, and [num_kept, C] drafts' inputs.

    Raises:
        ValueError: K is above what the plan was made for, or the plan is of another number of kept
            rows.
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
    outs = []
    for start in range(0, plan.num_rows, _TILE):
        taken = mx.take(source, plan.taps[start : start + _TILE, planned - num_taps :], axis=0)
        out = (taken * scale).sum(1)
        outs.append((out if bias is None else out + bias).astype(dtype))
    ended = mx.take(source, plan.end_taps[:, planned - num_taps + 1 :], axis=0)
    drafts = mx.take(source, plan.keep, axis=0)
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs) if outs else inputs
    return out, ended.astype(states.dtype), drafts
