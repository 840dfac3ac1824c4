# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the kernels' sources are caught by the intended check.

A probe is one call of an operation on a small batch, interpreted in check mode, whose result is
compared with a formula. Sources as they are pass every probe.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import Checker, KernelViolation

import metal_kernels
from metal_kernels import (
    convolution,
    kernel,
    kv_blocks,
    kv_gather,
    kv_states,
    kv_write,
    paged_attention,
)
from metal_kernels.kernel_text import without_comments
from metal_kernels.kv_blocks import reference as blocks_reference
from metal_kernels.kv_gather import reference as gather_reference
from metal_kernels.kv_states import reference as states_reference
from metal_kernels.kv_write import RotationKind
from metal_kernels.kv_write import reference as write_reference
from metal_kernels.paged_attention import AttentionShape, Tiles
from metal_kernels.paged_attention.splits import ALWAYS, DEFAULT
from metal_kernels.sequences import StatePart
from tests.metal_kernels import states_probes
from tests.metal_kernels.kv_write.rotating import Rotating, rotated
from tests.metal_kernels.mutants import MUTANTS, OVERFLOWS, WRONG, Mutant
from tests.metal_kernels.paged_attention.batches import (
    Batch,
    bias_of,
    decoded,
    expected,
    make_batch,
    overstated,
)
from tests.metal_kernels.sequences_play import one_request

SCHEDULES = ("forward", "reverse", "random:1")
SCALE = 0.09
NOTHING_BEFORE = mx.zeros(8, mx.uint32)

Probe = Callable[[], None]  # raises KernelViolation, or AssertionError for a wrong result


def check_fence(fence: mx.array) -> None:
    np.testing.assert_array_equal(np.array(fence), np.zeros(8, np.uint32))


def check_attention(
    batch: Batch,
    wanted: np.ndarray,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    most_behind: int = 0,
    tiles: Tiles | None = None,
    block_size: int | None = None,
    bias: mx.array | None = None,
) -> None:
    seq_lens, tables, lag = batch.seq_lens, batch.tables, None
    if most_behind:
        seq_lens, tables, lag = overstated(batch, most_behind)
    plan = paged_attention.plan(
        batch.starts,
        seq_lens,
        tables,
        batch.shape,
        window,
        tiles,
        lag=lag,
        splits=DEFAULT if block_size is None else ALWAYS,
        block_size=block_size,
        extent=None if bias is None else bias.shape[-1],
    )
    out, fences = paged_attention.run(
        plan,
        batch.queries,
        batch.key_pool,
        batch.value_pool,
        NOTHING_BEFORE,
        SCALE,
        softcap=softcap,
        sinks=None if sinks is None else mx.array(sinks),
        key_scales=batch.key_scales,
        value_scales=batch.value_scales,
        bias=bias,
    )
    for fence in fences:
        check_fence(fence)
    largest = max(np.abs(values).max() for _, values in batch.contexts)
    np.testing.assert_allclose(np.array(out), wanted, atol=1e-5 * largest, rtol=0)


@dataclass(frozen=True)
class Attention:
    """Attention of a ragged batch in float32, against the float64 formula."""

    requests: tuple[tuple[int, int], ...]  # (tokens computed before, rows of this step) of each
    head_size: int = 64
    cache: mx.Dtype | None = None  # None for that of the queries
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    extent: int | None = None  # distances with a bias
    most_behind: int = 0  # by how much the host overstates contexts
    tiles: Tiles | None = None  # to choose from
    #: (indices of requests, blocks that they begin with in common) of each group, read once.
    alike: tuple[tuple[tuple[int, ...], int], ...] = ()

    @cached_property
    def case(self) -> tuple[Batch, np.ndarray, np.ndarray | None, mx.array | None]:
        """Returns batch, expected output, sinks, bias."""
        rng = np.random.default_rng(0)
        num_kv_heads = 1 if self.head_size == 576 else 2
        shape = AttentionShape(4, num_kv_heads, self.head_size, min(self.head_size, 512))
        batch = make_batch(
            rng, self.requests, shape, mx.float32, self.cache, self.block_size, self.alike
        )
        sinks = rng.normal(size=4).astype(np.float32) if self.has_sinks else None
        bias = None if self.extent is None else bias_of(rng, batch, self.extent)
        wanted = expected(batch, SCALE, self.window, self.softcap, sinks, bias=bias)
        return batch, wanted, sinks, bias

    def __call__(self) -> None:
        batch, wanted, sinks, bias = self.case
        options = self.window, self.softcap, sinks, self.most_behind, self.tiles
        check_attention(batch, wanted, *options, self.block_size if self.alike else None, bias)


@dataclass(frozen=True)
class Write:
    """A write into pools of codes against the reference, byte for byte.

    Rows are of very different sizes, one is of zeros, and one has numbers half way between codes;
    of the slots, the pool lacks two.
    """

    dtype: mx.Dtype

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns [6, 3, 64] keys and [6, 3, 32] values."""
        rng = np.random.default_rng(0)
        size = 2.0 ** np.arange(-9, 9, 3)[:, None, None]
        keys = (rng.normal(size=(6, 3, 64)) * size).astype(np.float32)
        values = (rng.normal(size=(6, 3, 32)) * size).astype(np.float32)
        keys[1], values[1] = 0.0, 0.0
        # The largest code as the largest number makes the scale 1, and large numbers that this one
        # holds exactly make it fp8's best; fp8's subnormals are 2^-9 apart, its numbers from 16 to
        # 32 by 2, from 32 on by 4.
        subnormals_and_more = np.concatenate([np.arange(16) / 2**10, np.arange(16, 47)])
        special = subnormals_and_more if self.dtype == mx.uint8 else np.arange(47) / 2
        keys[0, :, :47] = special
        keys[0, :, 48:] = np.resize([416, 352, 288, 208], 16) if self.dtype == mx.uint8 else 0.0
        keys[0, :, :47:3] *= -1.0
        keys[0, :, 47] = 448.0 if self.dtype == mx.uint8 else 127.0
        keys[3, 0], keys[3, 0, 5] = 0.0, 448 * 13  # 416 * 14 too: two of fp8's scales are exact
        return keys, values

    def __call__(self) -> None:
        keys, values = map(mx.array, self.rows)
        arguments: dict[str, Any] = {
            "keys": keys,
            "values": values,
            "slot_mapping": mx.array([5, 40, -1, 2, 47, 48]),
            "key_pool": mx.full((3, 3, 16, 64), 7, self.dtype),
            "value_pool": mx.full((3, 3, 16, 32), 7, self.dtype),
            "key_scales": mx.full((3, 3, 16), 0.5, mx.bfloat16),
            "value_scales": mx.full((3, 3, 16), 0.5, mx.bfloat16),
        }
        wanted = write_reference.write(**arguments)
        check_fence(kv_write.write(**arguments))
        names = ("key_pool", "value_pool", "key_scales", "value_scales")
        for name, pool in zip(names, wanted, strict=True):
            assert mx.array_equal(arguments[name], pool)


def rotate(
    dtype: mx.Dtype, pool_dtype: mx.Dtype, kind: RotationKind, sizes: tuple[int, ...]
) -> Probe:
    """Checks a rotating write against the formula; one slot is outside the pool."""

    def probe() -> None:
        case = Rotating(sizes, dtype, pool_dtype, kind, slots=[5, 40, -1, 2, 47])
        queries = case.write()
        if queries is not None:
            wanted = rotated(case.queries, case.positions, case.rotation)
            np.testing.assert_allclose(np.array(queries), wanted, rtol=1e-3, atol=1e-3)
        keys = mx.array(rotated(case.keys, case.positions, case.rotation).astype(np.float32))
        codes, scales = write_reference.encode(keys.astype(dtype), pool_dtype)
        held = np.array(gather_reference.decode(codes, scales))[[0, 1, 3, 4]]
        np.testing.assert_allclose(np.array(case.held_keys()), held, rtol=0.13, atol=1e-3)
        if pool_dtype == mx.float32:  # rounded as the rows are
            assert mx.array_equal(case.held_keys().astype(dtype), case.held_keys())
        case.check_values()

    return probe


def gather() -> None:
    """Gathers with blocks outside the pool, bounds and heads."""
    rng = np.random.default_rng(0)
    pool = mx.array(rng.integers(0, 127, (3, 5, 16, 64)).astype(np.uint8))
    scales = mx.array(rng.uniform(0.5, 2.0, (3, 5, 16))).astype(mx.bfloat16)
    table = mx.array([[1, 4], [2, -1], [5, 0]], mx.int32)
    check_gathered(pool, table, scales, ((0, 32), (3, 30), (0, 17)), (1, 2))


def gather_values() -> None:
    """Gathers as bits, and in another dtype."""
    pool = mx.arange(2 * 3 * 16 * 64, dtype=mx.float32).reshape(2, 3, 16, 64).astype(mx.float16)
    for dtype in (mx.float16, mx.float32):
        check_gathered(pool, mx.array([[2, 1]], mx.int32), None, ((1, 31),), (0, 2), dtype)


def check_gathered(
    pool: mx.array,
    table: mx.array,
    scales: mx.array | None,
    bounds: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    dtype: mx.Dtype = mx.float32,
) -> None:
    read = mx.array(bounds, mx.int32)
    wanted = gather_reference.gather(pool, table, dtype, scales, read, heads)
    found, fence = kv_gather.gather(pool, table, dtype, scales=scales, bounds=read, heads=heads)
    np.testing.assert_array_equal(np.array(found), np.array(wanted))
    check_fence(fence)


def numbered_pool() -> mx.array:
    """Returns [3, 7, 16, 4] float32 with distinct elements."""
    return mx.arange(1, 3 * 7 * 64 + 1, dtype=mx.float32).reshape(3, 7, 16, 4)


def copy() -> None:
    pool, sources, targets = numbered_pool(), np.array([0, 3]), np.array([5, 2])
    (wanted,) = blocks_reference.copy([pool], sources, targets)
    check_fence(kv_blocks.copy([pool], sources, targets))
    np.testing.assert_array_equal(np.array(pool), np.array(wanted))


def zero() -> None:
    pool, blocks = numbered_pool(), np.array([2, 6])
    (wanted,) = blocks_reference.zero([pool], blocks)
    check_fence(kv_blocks.zero([pool], blocks))
    np.testing.assert_array_equal(np.array(pool), np.array(wanted))


def state_pools() -> list[mx.array]:
    """Makes K and V of different sizes in two-part blocks: a state continues in V."""
    keys = mx.arange(1, 3 * 8 * 32 + 1, dtype=mx.float32).reshape(3, 8, 4, 8)
    return [keys, mx.arange(1000, 1000 + 3 * 8 * 16, dtype=mx.float32).reshape(3, 8, 4, 4)]


STATE_WIDTH = 3 * 2 * 32 + 2 * 2 * 16 + 4  # K, two heads of V, and a run


def read_states() -> None:
    pools, blocks = state_pools(), mx.array([2, 0], mx.int32)
    wanted = states_reference.read(pools, blocks, STATE_WIDTH, 2)
    found, fence = kv_states.read(pools, blocks, STATE_WIDTH, 2)
    np.testing.assert_array_equal(np.array(found), np.array(wanted))
    check_fence(fence)


def write_states() -> None:
    pools, by_reference, blocks = state_pools(), state_pools(), np.array([3, 1])
    states = mx.arange(2 * STATE_WIDTH, dtype=mx.uint32).reshape(2, STATE_WIDTH) + (1 << 30)
    states_reference.write(by_reference, blocks, states, 2)
    check_fence(kv_states.write(pools, blocks, states, 2))
    for pool, wanted in zip(pools, by_reference, strict=True):
        assert mx.array_equal(pool.view(mx.uint32), wanted.view(mx.uint32))


# Groups of two heads. Up to four packed rows; the last request fills its row of the block table.
DECODES = ((37, 1), (30, 2), (127, 1))
PREFILLS = ((31, 5), (0, 7), (4, 1))  # two groups of eight packed rows, two tiles of keys
OF_PREFILL = Tiles((), (16,), True)
# Two groups, whose members do not follow each other; one request has no beginning in common.
SHARED = ((40, 1), (300, 2), (50, 1), (9, 1), (290, 1))
ALIKE = (((0, 2), 2), ((1, 4), 18))
SHARING = Tiles((8, 16), (), True, shared=0)
PROBES: dict[str, Probe] = {
    "decode": Attention(DECODES),
    "decode, window": Attention(DECODES, window=7, has_sinks=True),
    "decode, soft cap": Attention(DECODES, softcap=1.0),
    "decode, bias": Attention(DECODES, extent=20),
    "decode, blocks of 32": Attention(DECODES, block_size=32),
    "decode, fp8": Attention(((37, 1), (17, 2)), cache=mx.uint8),
    "decode, int8": Attention(((37, 1), (17, 2)), cache=mx.int8),
    "decode, 128": Attention(DECODES, head_size=128),
    "decode, latent": Attention(((17, 1),), head_size=576),
    "decode, latent fp8": Attention(((17, 1),), head_size=576, cache=mx.uint8),
    "decode, latent int8": Attention(((17, 1),), head_size=576, cache=mx.int8),
    "verify": Attention(((37, 16), (100, 9))),  # of 32 packed rows and 18, in four groups
    "decode, 80": Attention(((37, 1), (17, 1)), head_size=80),
    "decode, split": Attention(((299, 1), (20, 1)), has_sinks=True),
    # Ten parts, of which eight walks take one or two, in as many simdgroups.
    "decode, joined": Attention(((599, 1), (20, 1)), head_size=512),
    "decode, shared": Attention(SHARED, has_sinks=True, tiles=SHARING, alike=ALIKE),
    "decode, many": Attention(((3, 1),) * 17),  # and room for one tile more
    "prefill, many": Attention(((0, 5),) * 17, tiles=OF_PREFILL),
    "decode, behind": Attention(DECODES, most_behind=3),
    "prefill": Attention(PREFILLS, tiles=OF_PREFILL),
    "prefill, behind": Attention(PREFILLS, most_behind=3, tiles=OF_PREFILL),
    "prefill, window": Attention(PREFILLS, window=7, has_sinks=True, tiles=OF_PREFILL),
    "prefill, bias": Attention(PREFILLS, extent=20, tiles=OF_PREFILL),
    "prefill, fp8": Attention(((20, 5), (3, 1)), cache=mx.uint8, tiles=OF_PREFILL),
    "prefill, 192": Attention(((20, 5), (3, 1)), head_size=192, tiles=OF_PREFILL),
    "prefill, split": Attention(((290, 5), (3, 1)), has_sinks=True, tiles=OF_PREFILL),
    "write, fp8": Write(mx.uint8),
    "write, int8": Write(mx.int8),
    "write, rotated": rotate(mx.float16, mx.float32, RotationKind(16), (32, 32)),
    "write, rotated by a list": rotate(
        mx.float32, mx.uint8, RotationKind(16, 48, True, True), (64,)
    ),
    "gather": gather,
    "gather, values": gather_values,
    "copy": copy,
    "zero": zero,
    "read states": read_states,
    "write states": write_states,
    "convolution": states_probes.convolve,
    "recurrence, delta": lambda: states_probes.recur(True, "heads"),
    "recurrence, keys": lambda: states_probes.recur(False, "keys"),
    "recurrence, rates": lambda: states_probes.recur(False, "rates", key_size=9),
}


def planted(mutant: Mutant, compiler: kernel.Compiler) -> kernel.Compiler:
    """Wraps `compiler` to plant the fault in every kernel made of the mutant's file."""

    text, replacement = (_compact(each) for each in (mutant.text, mutant.replacement))
    file = Path(metal_kernels.__file__).parent / mutant.file
    found = _compact(without_comments(file.read_text())).count(text)
    if found != 1:  # no AssertionError, which stands for a wrong result
        raise ValueError(f"{mutant}: its text is found {found} times")

    def compile_kernel(*, header: str, source: str, **other: Any) -> Any:
        if f'"{file.name}"\n' in header + source:  # a #line of kernel.load
            header, source = (each.replace(text, replacement) for each in (header, source))
        return compiler(header=header, source=source, **other)

    return compile_kernel


def _compact(text: str) -> str:
    """Compacts text like `kernel.load`."""
    return re.sub(r" *\n *", "\n", text.lstrip(" "))


def objection(probe: Probe, compiler: kernel.Compiler) -> str | None:
    """Returns the error in kernels that `compiler` makes, or None."""
    try:
        with kernel.using(compiler):
            probe()
    except KernelViolation as violation:
        return violation.kind
    except AssertionError:
        return WRONG
    return None


#: Mutations that tests of the operations check in more shapes.
CHECKED_ELSEWHERE = (
    *("decode", "decode, soft cap", "decode, blocks of 32", "decode, fp8", "decode, int8"),
    *("decode, 128", "decode, 80", "decode, latent", "decode, latent fp8", "decode, latent int8"),
    *("verify", "prefill", "prefill, fp8", "prefill, 192"),
)


def _probes() -> Iterator[Any]:
    """Pairs every probe with every thread order; one order each outside of nightly runs."""
    for place, probe in enumerate(PROBES):
        for number, schedule in enumerate(SCHEDULES):
            marks: Any = pytest.mark.more if probe in CHECKED_ELSEWHERE else ()
            if place % len(SCHEDULES) != number:
                marks = pytest.mark.slow
            yield pytest.param(probe, schedule, marks=marks)


@pytest.mark.parametrize(("probe", "schedule"), list(_probes()))
def test_sources_as_they_are_pass(probe, schedule):
    assert objection(PROBES[probe], Checker(schedule).metal_kernel) is None


def _faults() -> list[Any]:
    """Selects the first fault of each file outside of nightly runs."""
    firsts = {mutant.file: mutant for mutant in reversed(MUTANTS)}
    return [
        pytest.param(
            mutant,
            id=str(mutant),
            marks=pytest.mark.more if firsts[mutant.file] is mutant else pytest.mark.slow,
        )
        for mutant in MUTANTS
    ]


@pytest.mark.parametrize("mutant", _faults())
def test_a_fault_is_caught_whatever_the_schedule(mutant):
    probe = PROBES[mutant.probe]
    found = {s: objection(probe, planted(mutant, Checker(s).metal_kernel)) for s in SCHEDULES}
    assert found == dict.fromkeys(SCHEDULES, mutant.caught_by)


class FarPool:
    """A pool of 2^32 elements and 2^13 more, the last head's last blocks.

    The last blocks alone hold anything: what goes astray in the pool reads or writes zeros.
    """

    HEADS, BLOCKS, BLOCK_SIZE, SIZE = 2, 2**21 + 4, 16, 64
    USED = 8  # of the last blocks

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.pool = mx.zeros((self.HEADS, self.BLOCKS, self.BLOCK_SIZE, self.SIZE), mx.uint8)
        self.scales = mx.zeros(self.pool.shape[:3], mx.bfloat16)
        with kernel.using(metal_interpreter.metal_kernel):
            self.fill()

    def fill(self) -> tuple[mx.array, mx.array]:
        """Refills the last blocks; `used`: their expected contents."""
        slots = mx.arange(
            (self.BLOCKS - self.USED) * self.BLOCK_SIZE, self.BLOCKS * self.BLOCK_SIZE
        )
        rows = self.rng.normal(size=(slots.size, self.HEADS, self.SIZE)).astype(np.float32)
        keys = mx.array(rows)
        mx.eval(kv_write.write(keys, None, slots, self.pool, None, key_scales=self.scales))
        codes, scales = write_reference.encode(keys.swapaxes(0, 1), mx.uint8)
        assert scales is not None
        shape = (self.HEADS, self.USED, self.BLOCK_SIZE)
        return codes.reshape(*shape, self.SIZE), scales.reshape(shape)

    def used(self) -> tuple[mx.array, mx.array]:
        """Returns quantized values and scales of the last blocks."""
        return self.pool[:, -self.USED :], self.scales[:, -self.USED :]

    def blocks(self, *used: int) -> np.ndarray:
        """Maps indices among the last blocks to the pool's, [n] int32."""
        return np.array(used, np.int32) + self.BLOCKS - self.USED

    def write(self) -> None:
        wanted = self.fill()
        for found, array in zip(self.used(), wanted, strict=True):
            assert mx.array_equal(found, array)

    def gather(self) -> None:
        table = mx.array(self.blocks(7, 5))[None]
        found, _ = kv_gather.gather(self.pool, table, mx.float32, scales=self.scales)
        codes, scales = self.used()
        wanted = gather_reference.gather(codes, mx.array([[7, 5]]), mx.float32, scales)
        np.testing.assert_array_equal(np.array(found), np.array(wanted))

    def copy(self) -> None:
        self.fill_unfaulted()
        wanted = np.array(self.used()[0])
        wanted[:, 6] = wanted[:, 3]
        kv_blocks.copy([self.pool], self.blocks(3), self.blocks(6))
        np.testing.assert_array_equal(np.array(self.used()[0]), wanted)

    def read_states(self) -> None:
        width = self.HEADS * self.BLOCK_SIZE * self.SIZE
        found, _ = kv_states.read([self.pool], mx.array(self.blocks(7, 5)), width)
        wanted = self.used()[0][:, mx.array([7, 5])].swapaxes(0, 1).flatten(1)
        assert mx.array_equal(found, wanted)

    def write_states(self) -> None:
        self.fill_unfaulted()
        wanted = np.array(self.used()[0])
        states = wanted[:, [2]].swapaxes(0, 1).reshape(1, -1)
        wanted[:, 4] = wanted[:, 2]
        mx.eval(kv_states.write([self.pool], self.blocks(4), mx.array(states)))
        np.testing.assert_array_equal(np.array(self.used()[0]), wanted)

    def convolve(self) -> None:
        """Runs a step from one of the last head's last blocks to another."""
        part = StatePart(self.BLOCK_SIZE * self.SIZE + 16, (2, 8), mx.float32)
        size, blocks = 2 * 8 * 4, self.blocks(3, 6)
        weight, pools = mx.ones((8, 3)), [self.pool]
        rows = mx.array(self.rng.normal(size=(4, 8)).astype(np.float32))
        begin = one_request(3, 3, write=int(blocks[0])).sequences()
        with kernel.using(metal_interpreter.metal_kernel):
            mx.eval(convolution.run(begin, rows[:3], None, weight, None, pools, part))
        step = one_request(1, 1, 0, 3, int(blocks[0]), int(blocks[1])).sequences()
        out, _, fence = convolution.run(step, rows[3:], None, weight, None, pools, part)
        mx.eval(fence)
        np.testing.assert_allclose(np.array(out[0]), np.array(rows[1:].sum(axis=0)), atol=1e-5)
        after = self.pool[1, -self.USED + 6].flatten()[16 : 16 + size].view(mx.float32)
        assert mx.array_equal(after.reshape(2, 8), rows[2:])

    def fill_unfaulted(self) -> None:
        """Refills the blocks without the fault, so that a copy has work to do."""
        with kernel.using(metal_interpreter.metal_kernel):
            self.fill()

    def attend(self, rows: int) -> None:
        """Attends for one request whose keys are also its values."""
        shape = AttentionShape(self.HEADS, self.HEADS, self.SIZE, self.SIZE)
        queries = self.rng.normal(size=(rows, self.HEADS, self.SIZE)).astype(np.float32)
        context = decoded(*self.used())[:, [7, 5]].reshape(self.HEADS, -1, self.SIZE)
        context = context[:, :20].swapaxes(0, 1)
        batch = Batch(
            shape,
            starts=np.array([0, rows], np.int32),
            seq_lens=np.array([20], np.int32),
            tables=self.blocks(7, 5)[None],
            queries=mx.array(queries),
            key_pool=self.pool,
            value_pool=self.pool,
            key_scales=self.scales,
            value_scales=self.scales,
            contexts=[(context, context)],
        )
        check_attention(batch, expected(batch, SCALE), tiles=OF_PREFILL if rows > 1 else None)

    def probe(self, name: str) -> Probe:
        return {
            "write": self.write,
            "gather": self.gather,
            "copy": self.copy,
            "read states": self.read_states,
            "write states": self.write_states,
            "convolution": self.convolve,
            "decode": lambda: self.attend(1),
            "prefill": lambda: self.attend(12),
        }[name]


FAR_PROBES = (
    *("write", "gather", "copy", "read states", "write states", "convolution", "decode", "prefill"),
)


@pytest.fixture(scope="module")
def far_pool() -> Iterator[FarPool]:
    far = FarPool()
    yield far
    del far.pool, far.scales
    mx.clear_cache()  # gives gigabytes back


@pytest.mark.more
@pytest.mark.heavy
@pytest.mark.parametrize("probe", FAR_PROBES)
def test_sources_as_they_are_pass_in_pools_beyond_32_bits(far_pool, probe):
    assert objection(far_pool.probe(probe), Checker().metal_kernel) is None


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("mutant", OVERFLOWS, ids=str)
def test_an_overflow_is_caught_in_pools_beyond_32_bits(far_pool, mutant):
    compiler = planted(mutant, Checker().metal_kernel)
    assert objection(far_pool.probe(mutant.probe), compiler) == mutant.caught_by
