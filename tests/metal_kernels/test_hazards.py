# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_kernels import convolution, kernel, recurrence
from metal_kernels.kv_blocks import op as kv_blocks
from metal_kernels.kv_gather import op as kv_gather
from metal_kernels.kv_states import op as kv_states
from metal_kernels.kv_write import op as kv_write
from metal_kernels.sequences import RecurrenceInputs, StatePart
from tests.metal_kernels.hazards import Dispatch, Encoder, Logger, Span, prove, prove_always
from tests.metal_kernels.sequences_play import one_request

SPLITS = range(51)  # 0: each dispatch in a buffer of its own, as where caches are large
POOL = Span(0, 1 << 20)


def span(number):
    """Returns a small buffer outside of the pool."""
    return Span((2 << 20) + 256 * number, (2 << 20) + 256 * number + 32)


def write(fence, *after):
    return Dispatch("write", (POOL, *after), (fence,), written=(POOL,))


def read(fence, *after):
    return Dispatch("read", (POOL, *after), (fence,))


def other(output, *inputs):
    return Dispatch("other", inputs, (output,))


def steps(count, reader_waits=True, write_waits=True, readers=1, between=3):
    """Runs pipelined steps of one layer: a write, model operations, readers."""
    numbers = iter(range(10**6))
    log: list[Dispatch] = []
    fences: list[Span] = []
    for _ in range(count):
        written = span(next(numbers))
        log.append(write(written, *(fences if write_waits else ())))
        log += [other(span(next(numbers)), span(next(numbers))) for _ in range(between)]
        fences = [span(next(numbers)) for _ in range(readers)]
        log += [read(fence, *([written] if reader_waits else [])) for fence in fences]
    return log


def kinds(found):
    return {conflict.kind for conflict in found}


@pytest.mark.parametrize("readers", [1, 3])
def test_a_chain_of_fences_is_proven_wherever_buffers_end(readers):
    log = steps(3, readers=readers)
    assert prove_always(log) == []
    assert [prove(log, split) for split in SPLITS] == [[]] * len(SPLITS)


def test_a_reader_without_the_writes_fence_is_found():
    log = steps(1, reader_waits=False)
    for split in SPLITS:
        (found,) = prove(log, split)
        assert (found.names, found.kind) == ("write, read", "write, read")
    assert len(prove_always(log)) == 1


@pytest.mark.parametrize("split", SPLITS)
def test_a_write_without_the_readers_fence_is_found_in_one_buffer_and_across(split):
    log = steps(2, write_waits=False)
    assert "read, write" in kinds(prove(log, split))


def test_a_write_must_wait_for_every_reader():
    a, b, c, d = map(span, range(4))
    log = [write(a), read(b, a), read(c, a), write(d, b)]
    (found,) = prove_always(log)
    assert (found.first, found.second, found.kind) == (2, 3, "read, write")
    assert prove(log, 1) == [found]  # buffers of two
    assert prove(log, 50) == []  # by chance: the barrier for b is one for c too


def test_an_old_fence_does_not_do():
    a, b, c, d = map(span, range(4))
    log = [write(a), read(b, a), write(c, b), read(d, a)]
    assert kinds(prove(log, 50)) == {"write, read"}


def test_order_by_chance_is_not_enough():
    a, x, y, z = map(span, range(4))
    log = [write(a), other(x), other(y, x), read(z)]  # y's barrier falls before the reader
    assert prove(log, 50) == []
    assert len(prove(log, 2)) == 1  # the reader in a buffer of its own
    assert len(prove_always(log)) == 1


def test_parts_of_a_buffer_conflict_only_where_they_meet():
    low, high, most = Span(0, 100), Span(100, 200), Span(50, 200)
    first = Dispatch("low", (low,), (span(0),), written=(low,))
    assert prove_always([first, Dispatch("high", (high,), (span(1),))]) == []
    assert kinds(prove_always([first, Dispatch("most", (most,), (span(1),))])) == {"write, read"}


def test_the_encoder_places_barriers_as_mlx_does():
    a, b, c, d, e = map(span, range(5))
    encoder = Encoder(ops_per_buffer=100)
    log = [
        other(b, a),
        other(c, a),  # two that read the same: none
        other(d, b),  # reads an output
        other(e, c),  # c was written before that barrier
        other(e),  # writes an output again
        other(c, d),
        other(d),  # writes what was read
    ]
    assert [encoder.encode(dispatch)[1] for dispatch in log] == [0, 0, 1, 1, 2, 2, 3]


def test_an_encoder_waits_for_all_that_its_inputs_waited_for():
    a, b, c, d = map(span, range(4))
    encoder = Encoder(ops_per_buffer=0)
    for dispatch in [other(a), other(b, a), other(c, b), other(d)]:
        encoder.encode(dispatch)
    assert encoder.waits == [0b0, 0b1, 0b11, 0b0]


@st.composite
def logs(draw):
    buffers = [span(number) for number in range(8)]
    log = []
    for _ in range(draw(st.integers(2, 14))):
        bound = draw(st.lists(st.sampled_from(buffers), max_size=3))
        output = draw(st.sampled_from(buffers))
        touches = draw(st.sampled_from(["nothing", "reads", "writes"]))
        pool = () if touches == "nothing" else (POOL,)
        log.append(
            Dispatch(
                touches, (*pool, *bound), (output,), written=pool if touches == "writes" else ()
            )
        )
    return log


@given(logs(), st.integers(0, 6))
def test_what_always_holds_holds_in_each_split(log, split):
    assert set(prove(log, split)) <= set(prove_always(log))


def without_effect(
    name: str, input_names: list[str], output_names: list[str], source: str, header: str
):
    """Replaces a compiler with one whose kernels return zeros."""

    def run(inputs: Sequence[mx.array], output_shapes, output_dtypes, **rest) -> list[mx.array]:
        mx.eval(inputs)
        return [mx.zeros(*output) for output in zip(output_shapes, output_dtypes, strict=True)]

    return run


@pytest.fixture
def logger():
    logger = Logger(without_effect)
    with kernel.using(logger.metal_kernel):
        yield logger


def pool(dtype=mx.float16):
    return mx.zeros((2, 4, 16, 64), dtype)


def rows():
    return mx.zeros((3, 2, 64), mx.float16)


SLOTS = mx.array([0, 1, 2])
TABLE = mx.array([[0]], mx.int32)


def test_the_logger_sees_kernels_through_their_operations(logger):
    keys, values = pool(), pool()
    fences = [kv_write.write(rows(), rows(), SLOTS, keys, values)]
    for _ in range(2):
        reads = [kv_gather.gather(part, TABLE, mx.float16, fences)[1] for part in (keys, values)]
        third = kv_gather.gather(keys, TABLE, mx.float16, fences)[1]
        fences = [kv_write.write(rows(), rows(), SLOTS, keys, values, [*reads, third])]
    fences = [kv_blocks.copy([keys, values], np.array([0]), np.array([1]), fences)]
    _, gathered = kv_gather.gather(values, TABLE, mx.float16, fences)
    states, read = kv_states.read([keys, values], mx.array([1]), 40, after=fences)
    kv_states.write([keys, values], np.array([2]), states, after=[gathered, read])

    names = [dispatch.name for dispatch in logger.log]
    step = ["kv_gather"] * 3 + ["mlx", "kv_write"]  # mlx: two of three fences made one
    moves = ["kv_blocks", "kv_blocks", "kv_gather", "read_states", "write_states"]
    assert names == ["kv_write", *step, *step, *moves]
    assert prove_always(logger.log) == []
    assert [prove(logger.log, split) for split in SPLITS] == [[]] * len(SPLITS)


def convolve(pools, after=()):
    return convolution.run(
        *(one_request(3, 1).sequences(), mx.zeros((3, 8)), None, mx.zeros((8, 4)), None),
        *(pools, StatePart(0, (3, 8), mx.float32), 1, after),
    )[2]


def recur(pools, after=()):
    heads = mx.zeros((3, 2))
    inputs = RecurrenceInputs(mx.zeros((3, 2, 8)), mx.zeros((3, 2, 4)), heads, heads)
    return recurrence.run(
        *(one_request(3, 1).sequences(), mx.zeros((3, 2, 8)), inputs, None),
        *(pools, StatePart(96, (2, 4, 8), mx.float32), True, None, 1, after),
    )[2]


def test_fences_order_kernels_that_bring_states_on(logger):
    pools, fences = [pool(), pool()], ()
    for _ in range(2):  # steps
        for run in (convolve, recur):
            fences = [run(pools, fences)]
    kv_states.read(pools, mx.array([1]), 40, after=fences)
    names = [dispatch.name for dispatch in logger.log]
    assert names == [*["convolution", "recurrence"] * 2, "read_states"]
    assert all(len(dispatch.written) == 2 for dispatch in logger.log[:-1])
    assert prove_always(logger.log) == []
    assert [prove(logger.log, split) for split in SPLITS] == [[]] * len(SPLITS)


def test_states_brought_on_without_a_fence_are_found(logger):
    pools = [pool(), pool()]
    convolve(pools)
    recur(pools)
    (found,) = prove_always(logger.log)
    assert (found.names, found.kind) == ("convolution, recurrence", "write, write")


def test_the_logger_finds_a_fence_left_out_of_a_merge(logger):
    keys, values = pool(), pool()
    fence = kv_write.write(rows(), rows(), SLOTS, keys, values)
    kept, _, last = (kv_gather.gather(keys, TABLE, mx.float16, [fence])[1] for _ in range(3))
    kv_write.write(rows(), rows(), SLOTS, keys, values, [kept, last])
    (found,) = prove_always(logger.log)
    assert (found.first, found.kind, found.names) == (2, "read, write", "kv_gather, kv_write")


def test_scales_are_written_where_a_cache_has_them(logger):
    codes, scales = pool(mx.uint8), mx.zeros((2, 4, 16), mx.bfloat16)
    fence = kv_write.write(rows(), None, SLOTS, codes, None, key_scales=scales)
    kv_gather.gather(codes, TABLE, mx.float16, [fence], scales=scales)
    assert len(logger.log[0].written) == 3  # the pool for want of values too, and the scales
    for _ in range(2):  # layers of plain caches share an array in the scales' place
        kv_write.write(rows(), rows(), SLOTS, pool(), pool())
    assert prove_always(logger.log) == []


def test_a_cache_that_mlx_would_copy_is_refused(logger):
    keys = mx.zeros((2, 4, 16, 128), mx.float16)[..., :64]
    with pytest.raises(ValueError, match="not row-contiguous"):
        kv_write.write(rows(), rows(), SLOTS, keys, pool())
