# SPDX-License-Identifier: Apache-2.0
"""Finds out which heads MLX has a fused attention kernel for, for prompts on this device."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise

import mlx.core as mx

from metal_kernels.paged_attention.plan import AttentionShape

#: Up to this many rows, MLX uses other kernels, which serve several heads at once but not every
#: size. Forcing a kernel that is missing is an error.
FEW_ROWS = 8
_ROWS = 64


def even_cuts(num_rows: int, most: int) -> Iterator[tuple[int, int]]:
    """Divides rows evenly into calls of at most `most`; yields first row and number of rows.

    Each call has more than FEW_ROWS rows, unless `most` or `num_rows` is close to FEW_ROWS.
    """
    count = -(-num_rows // most)
    ends = [num_rows * call // count for call in range(count + 1)]
    for first, end in pairwise(ends):
        yield first, end - first


def is_fused(key_size: int, value_size: int, dtype: mx.Dtype, device: mx.DeviceType) -> bool:
    """Returns whether MLX has a fused attention kernel for prompts with these head sizes."""
    # While a graph is recorded, MLX's function is replaced by one that accepts all sizes.
    return _has_kernel(mx.fast.scaled_dot_product_attention, key_size, value_size, dtype, device)


@cache
def _has_kernel(
    attend: Callable[..., mx.array],
    key_size: int,
    value_size: int,
    dtype: mx.Dtype,
    device: mx.DeviceType,
) -> bool:
    rows = (mx.zeros((1, 1, _ROWS, size), dtype) for size in (key_size, key_size, value_size))
    try:
        attend(*rows, scale=1.0, mask="causal", force_fused=True)
    except ValueError:
        return False
    return True


def fused_value_size(key_size: int, value_size: int, dtype: mx.Dtype) -> int | None:
    """Returns the value size to pad to for MLX's fused kernel; None: no kernel, as on a CPU."""
    device = mx.default_device().type
    sizes = (value_size, max(key_size, value_size))
    return next((size for size in sizes if is_fused(key_size, size, dtype, device)), None)


def is_plain(shape: AttentionShape, dtype: mx.Dtype, softcap: float | None) -> bool:
    """Returns whether prompts of these layers need plain.py, as MLX has no fused GPU kernel."""
    # None has a soft cap, or latents of 576 elements.
    if softcap is not None or shape.latent:
        return True
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return on_gpu and fused_value_size(shape.head_size, shape.value_size, dtype) is None
