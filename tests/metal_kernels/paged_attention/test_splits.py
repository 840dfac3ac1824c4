# SPDX-License-Identifier: Apache-2.0
"""Split parts balance GPUs of any size, or depend on their own request only."""

import heapq
from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_kernels import kernel, paged_attention
from metal_kernels.layout import PositionLag
from metal_kernels.paged_attention import AttentionShape, Splits, Tiles, plan
from metal_kernels.paged_attention.splits import WHOLE
from tests.metal_kernels.paged_attention.batches import expected, make_batch

CORES = (8, 10, 16, 20, 40, 60, 80)
PART_COST, JOIN = 24, 20  # keys


def decode_plan(lens, heads, group=4, **options):
    """Makes a plan of decoding requests with contexts of `lens`."""
    lens = np.array(lens, np.int32)
    starts, tables = np.arange(len(lens) + 1, dtype=np.int32), np.zeros((len(lens), 1), np.int32)
    return plan(starts, lens, tables, AttentionShape(group * heads, heads, 128, 128), **options)


def end_of(made, slots):
    """Returns the end time of the last threadgroup with `slots` slots, in keys."""
    (dispatch,) = made.dispatches
    ends = [0.0] * slots
    costs = [
        max(end - begin, 0) + PART_COST
        for _, _, count, begin, end, *_ in np.array(dispatch.tiles).tolist()
        if count
    ]
    for cost in costs * made.shape.num_kv_heads:  # the grid's second axis
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends)


def random_batch(rng):
    """Draws 64 equal or ragged contexts of 64 to 131072 keys; and K/V heads."""
    count, kind = int(2 ** rng.uniform(0, 6)), rng.integers(3)
    if kind == 0:
        lens = np.exp(rng.uniform(np.log(64), np.log(65536), count))
    elif kind == 1:
        lens = rng.uniform(0.8, 1.2, count) * np.exp(rng.uniform(np.log(128), np.log(32768)))
    else:
        long = np.exp(rng.uniform(np.log(8192), np.log(131072), count))
        lens = np.where(rng.random(count) < 0.1, long, rng.uniform(64, 2048, count))
    return lens.astype(int), int(rng.choice([1, 2, 4, 8]))


@pytest.mark.parametrize("count", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_last_threadgroup_ends_soon_after_the_ideal(count):
    rng = np.random.default_rng(0)
    batches = [random_batch(rng) for _ in range(count)]
    for cores in CORES:
        slots, splits = 3 * cores, Splits.of_gpu(cores)
        for lens, heads in batches:
            ideal = lens.sum() * heads / slots
            if ideal >= 512:
                took = end_of(decode_plan(lens, heads, splits=splits), slots)
                assert took <= (1.25 if ideal > 2048 else 1.5) * ideal, (cores, lens, heads)


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("lens", [[1000] * 31 + [65536], [200] * 120 + [16000] * 4], ids=len)
def test_long_contexts_beside_short_ones_keep_nobody_waiting(cores, lens):
    made = decode_plan(lens, 8, splits=Splits.of_gpu(cores))
    assert end_of(made, 3 * cores) <= 1.2 * sum(lens) * 8 / (3 * cores)


def test_contexts_are_split_where_the_reduction_costs_less_than_it_saves():
    """By simulation, the choice loses a sixth at most, and little on average."""
    rng, lost = np.random.default_rng(1), []
    for _ in range(100):
        (lens, heads), cores = random_batch(rng), int(rng.choice(CORES))
        chosen = decode_plan(lens, heads, splits=Splits.of_gpu(cores))
        whole = decode_plan(lens, heads, tiles=Tiles((4,), (), False))
        parts = chosen.dispatches[0].num_splits
        ends = [end_of(made, 3 * cores) for made in (chosen, whole)]
        if parts > 1:
            ends[0] += JOIN + min(parts, 8 + parts / 8)
        lost.append(ends[0] / min(ends) - 1)
    assert max(lost) <= 1 / 6 and np.mean(lost) <= 0.01


@pytest.mark.parametrize("splits", [Splits(slots=10**6), Splits(fixed=WHOLE)], ids=str)
def test_short_contexts_are_whole_on_every_gpu(splits):
    assert decode_plan([WHOLE, 3], 1, splits=splits).dispatches[0].splits is None
    assert decode_plan([WHOLE + 1, 3], 1, splits=splits).dispatches[0].num_splits > 1


def test_a_gpu_of_unknown_size_gets_the_defaults():
    assert Splits.of_gpu(None) == Splits() and Splits.of_gpu(10).slots == 30
    assert Splits.of_gpu(None, fixed=512) == Splits(fixed=512)


LARGE_STEPS = {
    "a prompt": ([(0, 2048)], AttentionShape(32, 8, 128, 128)),
    "a chunk behind a long context": ([(32768, 512)], AttentionShape(32, 8, 128, 128)),
    "latents": ([(131071, 1)] * 4, AttentionShape(128, 1, 576, 512)),
    "one long among many": ([(1000, 1)] * 255 + [(131071, 1)], AttentionShape(32, 8, 128, 128)),
    "drafts to verify": ([(65536, 8)] * 8, AttentionShape(64, 8, 128, 128)),
}


@pytest.mark.parametrize("name", LARGE_STEPS)
@pytest.mark.parametrize("cores", [8, 80])
def test_results_of_parts_take_little_memory(name, cores):
    """No budget counts them: they take as planned, or twice that for the worst lengths."""
    requests, shape = LARGE_STEPS[name]
    counts = np.array([rows for _, rows in requests], np.int32)
    lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    made = plan(
        starts, lens, np.zeros((len(lens), 1), np.int32), shape, splits=Splits.of_gpu(cores)
    )
    for dispatch in made.dispatches:
        assert dispatch.part_rows * shape.num_heads * shape.value_size * 4 <= 2**26


@pytest.mark.parametrize(
    ("rows", "parts", "size", "walkers"),
    [
        (32, 4, 128, 1),  # all of them in one round
        (32, 9, 128, 4),
        (32, 64, 128, 8),
        (32, 9, 64, 1),  # in two
        (32, 9, 512, 8),  # in nine
        (256, 32, 128, 2),  # of eight requests, which fit a GPU at once
        (4096, 32, 128, 1),
    ],
)
def test_a_row_s_parts_are_joined_by_as_many_simdgroups_as_pay(rows, parts, size, walkers):
    assert Splits.of_gpu(40).walkers(rows, parts, size) == walkers


def test_a_row_s_parts_are_joined_alike_by_any_number_of_simdgroups():
    """To the bit, and for any other requests; one walk has the second's parts alone."""
    requests = [(1500, 1), (150, 1)]
    shape = AttentionShape(4, 2, 256, 256)  # two parts a round
    batch = make_batch(np.random.default_rng(0), requests, shape, mx.float16)
    pools = batch.key_pool, batch.value_pool, mx.zeros(8, mx.uint32), 0.1

    def attend(first, joined_by):
        starts = np.arange(len(requests) - first + 1, dtype=np.int32)
        lens, tables = batch.seq_lens[first:], batch.tables[first:]
        splits = Splits(fixed=80, joined_by=joined_by)
        made = plan(starts, lens, tables, batch.shape, splits=splits)
        with kernel.using(metal_interpreter.metal_kernel):
            out, _ = paged_attention.run(made, batch.queries[first:], *pools)
        return np.array(out.astype(mx.float32))

    wanted = attend(0, 1)
    np.testing.assert_allclose(wanted, expected(batch, 0.1), atol=2e-3)
    for walkers in (2, 4, 8):
        np.testing.assert_array_equal(attend(0, walkers), wanted)
    np.testing.assert_array_equal(attend(1, 1), wanted[1:])


FEW = {  # cores, requests, K/V heads, group; whether their tiles have 512 threads
    "one stream on the smallest GPU": (8, [WHOLE], 8, 4, True),
    "two of them": (8, [WHOLE, 9], 8, 4, False),
    "four on a larger one": (40, [WHOLE] * 4, 8, 4, True),
    "many": (40, [WHOLE] * 16, 8, 4, False),
    "tiles of 16 rows": (40, [WHOLE], 8, 16, False),
    "a long one in parts": (40, [4096], 8, 4, False),
}


@pytest.mark.parametrize("name", FEW)
def test_few_short_contexts_are_walked_by_more_threads(name):
    """Rounds of 32 to 64 keys, by the number of contexts and the GPU's size alone."""
    cores, lens, heads, group, wide = FEW[name]
    splits = Splits.of_gpu(cores)
    (dispatch,) = decode_plan(lens, heads, group, splits=splits).dispatches
    assert dispatch.wide == wide
    tiles = replace(Tiles.for_layer(AttentionShape(group * heads, heads, 128, 128)), wide=False)
    (dispatch,) = decode_plan(lens, heads, group, splits=splits, tiles=tiles).dispatches
    assert not dispatch.wide


@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (512, 512), (576, 512)])
def test_other_heads_have_no_room_for_more(size, value_size):
    assert not Tiles.for_layer(AttentionShape(8, 1, size, value_size)).wide


@pytest.mark.parametrize(
    ("shape", "dtype", "rounds"),
    [
        (AttentionShape(2, 1, 128, 128), mx.float16, {64: (2, 1), 128: (4, 2), 256: (8, 4)}),
        pytest.param(
            AttentionShape(4, 1, 256, 256),
            mx.bfloat16,
            {64: (4, 2), 128: (8, 4), 256: (16, 8)},
            marks=pytest.mark.more,
        ),
    ],
    ids=str,
)
def test_more_threads_take_half_the_rounds_and_give_the_same_bits(shape, dtype, rounds):
    requests = [(length - 1, 1) for length in (1, 33, 64, 128, 150, WHOLE)]
    batch = make_batch(np.random.default_rng(0), requests, shape, dtype)
    pools = batch.key_pool, batch.value_pool, mx.zeros(8, mx.uint32), 0.1
    threads, keys = {}, {}

    def attend(slots):
        def metal_kernel(name, **text):
            def run(**call):
                threads[slots], given = call["threadgroup"][0], dict(call["template"])
                keys[slots] = 8 * given["STRIPS"] * given["WALKERS"]  # of a round of all walkers
                return compiled(**call)

            compiled = metal_interpreter.metal_kernel(name, **text)
            return run

        starts = np.arange(len(requests) + 1, dtype=np.int32)
        made = plan(starts, batch.seq_lens, batch.tables, shape, splits=Splits(slots=slots))
        with kernel.using(metal_kernel):
            out, _ = paged_attention.run(made, batch.queries, *pools)
        return np.array(out.astype(mx.float32))

    narrow, wide = attend(1), attend(100)
    assert threads == {1: 256, 100: 512}
    found = {n: (-(-n // keys[1]), -(-n // keys[100])) for n in rounds}
    assert found == rounds
    np.testing.assert_array_equal(narrow, wide)
    np.testing.assert_allclose(
        wide, expected(batch, 0.1), atol=2e-2 if dtype == mx.bfloat16 else 2e-3
    )


def parts_of(made, request):
    """Returns the splits of a request's rows: (packed rows, positions, part, parts)."""
    return sorted(
        tuple(tile[1:7])
        for dispatch in made.dispatches
        for tile in np.array(dispatch.tiles).tolist()
        if tile[0] == request and tile[2]
    )


request = st.tuples(st.integers(0, 3000), st.integers(1, 16) | st.integers(1, 100))


@given(
    requests=st.lists(request, min_size=2, max_size=6),
    heads=st.sampled_from([(4, 1), (8, 2), (6, 2), (16, 1), (71, 1)]),
    window=st.sampled_from([None, 256, 300, 1000]),
    most_behind=st.sampled_from([0, 3]),
    fixed=st.sampled_from([256, 272, 1024]),
)
def test_fixed_parts_of_a_request_are_the_same_alone_and_in_company(
    requests, heads, window, most_behind, fixed
):
    counts = np.array([rows for _, rows in requests], np.int32)
    lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables, shape = np.zeros((len(lens), 1), np.int32), AttentionShape(*heads, 64, 64)
    options = {"window": window, "splits": Splits(fixed=fixed)}
    lag = PositionLag(mx.zeros(len(lens), mx.int32), np.full(len(lens), most_behind))
    together = plan(starts, lens + most_behind, tables, shape, lag=lag, **options)
    for index, (_, rows) in enumerate(requests):
        own, begins = np.array([index]), np.array([0, rows], np.int32)
        own_lag = lag.of(own)
        alone = plan(begins, lens[own] + most_behind, tables[own], shape, lag=own_lag, **options)
        parts = parts_of(alone, 0)
        assert parts == parts_of(together, index)
        if rows <= 16:
            assert all(end - begin <= fixed for _, _, begin, end, *_ in parts)
        else:  # a prompt's chunk is whole
            assert {many for *_, many in parts} == {1}


@pytest.mark.parametrize("window", [None, pytest.param(290, marks=pytest.mark.more)])
def test_with_fixed_parts_an_answer_does_not_depend_on_company(window):
    """To the bit, by the interpreter."""
    requests = [(700, 1), (260, 1), (40, 1), (530, 1)] + [(300, 1)] * 12
    batch = make_batch(np.random.default_rng(0), requests, AttentionShape(8, 2, 64, 64), mx.float16)
    pools = batch.key_pool, batch.value_pool, mx.zeros(8, mx.uint32), 0.1

    def attend(members):
        starts = np.arange(len(members) + 1, dtype=np.int32)
        lens, tables = batch.seq_lens[members], batch.tables[members]
        made = plan(starts, lens, tables, batch.shape, window, splits=Splits(fixed=256))
        with kernel.using(metal_interpreter.metal_kernel):
            out, _ = paged_attention.run(made, batch.queries[mx.array(members)], *pools)
        return made, np.array(out)

    together, rows = attend(list(range(len(requests))))
    for index in range(4):
        alone, row = attend([index])
        assert parts_of(alone, 0) == parts_of(together, index)
        np.testing.assert_array_equal(row[0], rows[index])


def test_parts_that_fit_a_step_are_others_in_company():
    alone, crowd = decode_plan([2000], 8), decode_plan([2000] * 200, 8)
    assert parts_of(alone, 0) != parts_of(crowd, 0)
