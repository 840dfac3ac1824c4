# SPDX-License-Identifier: Apache-2.0
"""Writes against a formula over torch's conversions, and against the reference, byte for byte."""

from dataclasses import dataclass

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import valuewise

from metal_kernels import kernel, kv_write
from metal_kernels.kv_write import reference

F16, BF16, F32, FP8, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.uint8, mx.int8
TORCH = {F16: torch.float16, BF16: torch.bfloat16, F32: torch.float32}
TOPS = {FP8: [448, 416, 384, 352, 320, 288, 256], INT8: [127]}  # codes of largest elements
FENCE_BYTES = 32


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


def as_bytes(array):
    return np.array(array.view(mx.uint8))


def noise(rng, shape, dtype):
    """Fills a pool with noise, to expose stray writes."""
    values = rng.integers(1, 100, shape).astype(np.float32)
    return mx.array(values).astype(dtype)


def make_rows(rng, shape, dtype):
    """Makes rows of very different scale, some of them zero."""
    size = 2.0 ** rng.integers(-9, 9, (*shape[:2], 1)) * (rng.random((*shape[:2], 1)) > 0.1)
    return mx.array((rng.normal(size=shape) * size).astype(np.float32)).astype(dtype)


def encoded(row, dtype):
    """Encodes a float32 row as pool bytes with a bfloat16 scale."""
    if dtype in TORCH:
        return torch.from_numpy(row).to(TORCH[dtype]).view(torch.uint8).numpy(), None
    choices = [coded(row, dtype, top) for top in TOPS[dtype]]
    unit = (np.abs(row).max() or np.float32(1)) / 2**14
    errors = [np.square((row - values) / unit).astype(int).sum() for _, _, values in choices]
    codes, scale, _ = choices[np.argmin(errors)]  # the first of the best
    return codes, scale


def coded(row, dtype, top):
    """Quantizes a float32 row with its largest element as `top`; returns bytes, scale, values."""
    scale = torch.tensor(np.abs(row).max() / np.float32(top)).bfloat16().float().numpy()
    codes = torch.from_numpy(row / scale if scale else row)
    if dtype == INT8:
        codes = codes.round().clamp(-127, 127).to(torch.int8)
    else:
        codes = codes.clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), scale, codes.float().numpy() * scale


@dataclass
class Part:
    """Keys or values of a write."""

    rows: mx.array
    pool: mx.array
    scales: mx.array | None

    def expected(self, slots):
        """Returns the expected bytes and scales of the pool after the write."""
        pool = as_bytes(self.pool)
        scales = None if self.scales is None else np.array(self.scales.astype(F32))
        for row, slot in zip(np.array(self.rows.astype(F32)), slots, strict=True):
            block, offset = divmod(slot, pool.shape[2])
            for head in range(len(row) if slot >= 0 else 0):
                pool[head, block, offset], scale = encoded(row[head], self.pool.dtype)
                if scales is not None:
                    scales[head, block, offset] = scale
        return pool, scales


class Write:
    """A random write of keys, or of keys and values."""

    def __init__(self, kind, slots, heads=3, block_size=16, seed=0):
        sizes, dtype, pool_dtype = kind
        rng = np.random.default_rng(seed)
        shape = (heads, max([0, *slots]) // block_size + 1, block_size)
        self.slots = slots
        self.slot_mapping = mx.array(np.array(slots, np.int32))
        self.parts = [
            Part(
                make_rows(rng, (len(slots), heads, size), dtype),
                noise(rng, (*shape, size), pool_dtype),
                noise(rng, shape, BF16) if pool_dtype in TOPS else None,
            )
            for size in sizes
        ]

    def arguments(self):
        none = Part(None, None, None)
        keys, values = self.parts if len(self.parts) == 2 else (*self.parts, none)
        return {
            "keys": keys.rows,
            "values": values.rows,
            "slot_mapping": self.slot_mapping,
            "key_pool": keys.pool,
            "value_pool": values.pool,
            "key_scales": keys.scales,
            "value_scales": values.scales,
        }

    def check(self):
        wanted = [part.expected(self.slots) for part in self.parts]
        new = reference.write(**self.arguments())
        for index, (pool, scales) in enumerate(wanted):
            np.testing.assert_array_equal(as_bytes(new[index]), pool)
            if scales is not None:
                np.testing.assert_array_equal(np.array(new[2 + index].astype(F32)), scales)
        mx.eval(kv_write.write(**self.arguments()))
        for part, (pool, scales) in zip(self.parts, wanted, strict=True):
            np.testing.assert_array_equal(as_bytes(part.pool), pool)
            if scales is not None:
                np.testing.assert_array_equal(np.array(part.scales.astype(F32)), scales)

    def fewest_bytes(self):
        """Minimum bytes to read if each written row is read once."""
        count = sum(slot >= 0 for slot in self.slots) * self.parts[0].pool.shape[0]
        read, written = 0, FENCE_BYTES
        for part in self.parts:
            read += count * part.pool.shape[3] * part.rows.dtype.size
            written += count * part.pool.shape[3] * part.pool.dtype.size
            written += 0 if part.scales is None else count * part.scales.dtype.size
        return read, written


# Head sizes of keys and of values, dtypes of rows and pools. Each is a kernel to compile; by day
# those to bits, to another float, to each kind of codes, of latents, of sizes that fill no lane.
KINDS = [
    ((64, 64), F16, F16),
    ((80, 80), F32, F32),
    ((96, 96), BF16, BF16),
    ((128, 128), F32, F16),
    ((192, 128), F16, BF16),
    ((256, 256), F32, BF16),
    ((512, 512), BF16, FP8),
    ((576,), F16, INT8),
    ((576,), BF16, BF16),
    ((128, 128), F16, FP8),
    ((80, 80), F32, INT8),
    ((10, 9), F32, FP8),
]


@pytest.mark.parametrize(
    "kind",
    [
        kind if place in (0, 4, 7, 9, 11) else pytest.param(kind, marks=pytest.mark.more)
        for place, kind in enumerate(KINDS)
    ],
    ids=str,
)
@settings(max_examples=6)
@given(
    slots=st.lists(st.integers(0, 95), max_size=12, unique=True),
    padding=st.lists(st.integers(0, 12), max_size=3),
    heads=st.integers(1, 9),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**16),
)
def test_pools_hold_the_rows_byte_for_byte(kind, slots, padding, heads, block_size, seed):
    for place in padding:
        slots.insert(place, -1)
    Write(kind, slots, heads, block_size, seed).check()


@valuewise(
    kind=[KINDS[0], KINDS[4], KINDS[7], KINDS[11]],
    schedule=["forward", "reverse", "random:1", "random:2"],
)
def test_any_order_of_threads_moves_the_same_and_no_byte_more(kind, schedule):
    checker = metal_interpreter.Checker(schedule=schedule)
    write = Write(kind, slots=[5, -1, 40, 0, 17])
    with kernel.using(checker.metal_kernel):
        write.check()
    (dispatch,) = checker.dispatches
    read = dispatch.buffers["keys"].read_bytes + dispatch.buffers["values"].read_bytes
    written = sum(traffic.written_bytes for traffic in dispatch.buffers.values())
    assert (read, written) == write.fewest_bytes()


def test_slots_of_either_dtype_and_more_of_them_than_rows():
    write = Write(KINDS[0], slots=[3, 20])
    write.slot_mapping = mx.array([3, 20, 21, 5, 6, 7, 8, 9, 10], dtype=mx.int64)
    write.check()


def squared_error(row, values):
    return np.square(row.astype(np.float64) - values).sum()


@pytest.mark.parametrize("size", [64, pytest.param(576, marks=pytest.mark.more)])
def test_each_row_in_fp8_loses_least_by_its_scale(size):
    rows = np.array(make_rows(np.random.default_rng(0), (50, 4, size), F32)).reshape(-1, size)
    codes, scales = reference.encode(mx.array(rows), FP8)
    values = np.array(mx.from_fp8(codes, dtype=F32) * scales.astype(F32)[:, None])
    found = [squared_error(row, kept) for row, kept in zip(rows, values, strict=True)]
    choices = [[squared_error(row, coded(row, FP8, top)[2]) for top in TOPS[FP8]] for row in rows]
    least = np.min(choices, axis=1)
    unit = np.square(np.abs(rows).max(axis=1) / 2**14)  # errors are cut to whole ones
    assert (found <= least + size * unit).all()
    assert sum(found) < sum(least) * (1 + 1e-6)
    by_448 = np.array(choices)[:, 0]
    assert (found <= by_448 + size * unit).all()
    sizes = np.where(by_448 > 0, np.square(rows).sum(axis=1), 1.0)
    assert (found / sizes).mean() < 0.9 * (by_448 / sizes).mean()


def test_rows_with_nan_or_infinity_decode_to_nothing_finite():
    write = Write(KINDS[9], slots=[2, 3])
    keys = write.parts[0]
    keys.rows[0, :, 5], keys.rows[1, :, 6] = np.nan, np.inf
    mx.eval(kv_write.write(**write.arguments()))
    codes = mx.from_fp8(keys.pool[:, 0, 2:4], dtype=F32) * keys.scales[:, 0, 2:4, None]
    assert not np.isfinite(np.array(codes)).any()


def changed(**other):
    arguments = Write(KINDS[9], slots=[0, 1]).arguments() | other
    return pytest.param(arguments, next(iter(other)), id=next(iter(other)))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        changed(keys=mx.zeros((2, 3, 128), mx.int32)),
        changed(values=None),
        changed(values=mx.zeros((2, 3, 128), F32)),
        changed(slot_mapping=mx.zeros(1, mx.int32)),
        changed(slot_mapping=mx.zeros((2, 1), mx.int32)),
        changed(slot_mapping=mx.zeros(2, mx.float32)),
        changed(key_pool=mx.zeros((2, 1, 16, 128), FP8)),
        changed(key_pool=mx.zeros((3, 1, 16, 128), mx.int32)),
        changed(value_pool=mx.zeros((3, 1, 16, 128), F16)),
        changed(value_pool=mx.zeros((3, 2, 16, 128), FP8)),
        changed(key_scales=None),
        changed(value_scales=mx.zeros((3, 1, 16), F16)),
        changed(after=[mx.zeros(4, mx.uint32)]),
    ],
)
def test_refuses_what_does_not_fit_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        kv_write.write(**arguments)
