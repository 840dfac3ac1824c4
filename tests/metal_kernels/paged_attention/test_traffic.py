# SPDX-License-Identifier: Apache-2.0
"""K and V are loaded once for all query rows and heads."""

from itertools import product

import mlx.core as mx
import pytest
from pairs import valuewise

from benchmarks.kernel_traffic import Workload, measure
from metal_kernels.paged_attention import AttentionShape


def ratio(group, batch, rows, context, head_size=128, dtype=mx.float16):
    shape = AttentionShape(2 * group, 2, head_size, head_size)
    return measure(Workload("", shape, batch, rows, context, dtype)).ratio


@valuewise(requests=[(1, 8192), (32, 100), (4, 1111), (1, 100)], group=[4, 8, 1])
def test_decode(requests, group):
    batch, context = requests
    assert 1.0 <= ratio(group, batch, 1, context) <= 1.05


@pytest.mark.more
@pytest.mark.heavy
def test_decode_of_a_full_batch_of_long_contexts():
    assert 1.0 <= ratio(1, 32, 1, 8192, head_size=64) <= 1.05


@pytest.mark.parametrize(
    ("rows", "group"),
    [
        *((2, 8), (5, 1), (8, 4)),
        *(
            pytest.param(rows, group, marks=pytest.mark.slow)
            for rows, group in product(range(2, 9), (1, 4, 8))
            if (rows, group) not in ((2, 8), (5, 1), (8, 4))
        ),
    ],
)
def test_verify_windows(group, rows):
    assert 1.0 <= ratio(group, 3, rows, 700) <= 1.10


@pytest.mark.parametrize(
    ("group", "batch", "rows", "context", "common", "dtype"),
    [
        (4, 4, 2, 1700, 1600, mx.bfloat16),  # drafts; tails that are whole
        pytest.param(4, 8, 1, 900, 800, mx.float16, marks=pytest.mark.slow),
        pytest.param(8, 4, 1, 2100, 1600, mx.float16, marks=pytest.mark.more),  # tails in parts
        pytest.param(1, 32, 1, 430, 400, mx.float16, marks=pytest.mark.slow),
    ],
)
def test_shared_prefixes_are_read_once(group, batch, rows, context, common, dtype):
    """The largest tile takes the rows of that many requests."""
    shape = AttentionShape(2 * group, 2, 64, 64)
    work = Workload("", shape, batch, rows, context, dtype, common)
    figures = measure(work)
    assert 1.0 <= figures.ratio <= 1.10
    assert [dispatch.kernel for dispatch in figures.dispatches].count("decode") == 2


@pytest.mark.parametrize("heads", [pytest.param(8, marks=pytest.mark.more), 16])
def test_latents_are_loaded_once_for_each_eight_heads(heads):
    shape = AttentionShape(heads, 1, 576, 512)
    found = measure(Workload("", shape, batch=2, rows=1, context=300)).ratio
    assert heads / 8 <= found <= 1.02 * heads / 8


def test_what_is_written_is_what_must_be():
    shape = AttentionShape(8, 2, 64, 64)
    figures = measure(Workload("", shape, batch=3, rows=2, context=50, dtype=mx.bfloat16))
    write = figures.dispatches[0]
    assert write.kernel == "kv_write"
    for pool in ("key_pool", "value_pool"):
        assert write.buffers[pool].written_bytes == 3 * 2 * 2 * 64 * 2  # rows, heads, size, bytes
        assert write.buffers[pool].read_bytes == 0
    attend = figures.dispatches[1]
    assert attend.buffers["out"].written_bytes == 3 * 2 * 8 * 64 * 2
