# SPDX-License-Identifier: Apache-2.0
"""Pages leave a pool while steps are in flight, and enter another, bit by bit and in order.

A page is compared with the bytes that numpy finds in the pool's arrays. The interpreter runs a
kernel when it is called, once its inputs are computed. So these tests see a write that does not
wait for the copies before it; that copies wait for the writes before them shows in the graph alone.
"""

import io
import re
import threading

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
import torch
from engine.kv_cache.planned import planned
from engine.kv_cache.pools import DTYPES, KINDS, bits, built, make
from engine.kv_cache.test_specs import BLOCK, CASES
from hypothesis import given
from hypothesis import strategies as st
from pairs import pairwise, valuewise

from metal_kernels import kernel
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.layer_cache import KVShape
from vllm_metal.engine.kv_cache.pages import BlockPages, PagePart, finite_rows, page_rows
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import allocate_kv_caches, groups_of, kv_cache_specs

NAMES = ["layers.0", "draft.layers.0"]


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


def fill(state, seed):
    """Fills every block with random bits, NaN among them."""
    rng = np.random.default_rng(seed)
    arrays = [
        mx.array(np.frombuffer(rng.bytes(array.nbytes), bits(array).dtype).reshape(array.shape))
        for array in state.arrays
    ]
    state.arrays = [
        random.view(array.dtype) for random, array in zip(arrays, state.arrays, strict=True)
    ]
    mx.eval(state.arrays)
    return state


def two_layers(backend, dtype, seed=0):
    """Returns a target's layer and a draft network's layer of another shape, filled."""
    draft = backend.allocate(12, 16, KVShape(3, 32, 32), dtype)
    return {
        NAMES[0]: fill(make(backend, dtype), seed),
        NAMES[1]: fill(draft, seed + 1),
    }


def naive(states, names, block):
    """Returns a page's bytes: by layer and array, the block's [heads, slots, ...]."""
    parts = [bits(array)[:, block] for name in names for array in states[name].page_arrays]
    return b"".join(part.tobytes() for part in parts)


def in_thread(run):
    """Calls `run` in a thread, and returns its result or raises its error."""
    out = []

    def caught():
        try:
            out.append((run(), None))
        except BaseException as error:
            out.append((None, error))

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    result, error = out[0]
    if error is not None:
        raise error
    return result


def pages_of(arrays):
    """Returns the bytes of each page."""
    return [row.tobytes() for row in page_rows(arrays)]


class Steps:
    """Hands over steps like the runner: two at a time, where the pool allows it."""

    def __init__(self, kv_cache):
        self.kv_cache, self.in_flight = kv_cache, []

    def submit(self, *arrays):
        if not self.kv_cache.pipelined:
            mx.eval(self.in_flight)
        self.in_flight = list(arrays)
        mx.async_eval(self.in_flight)


@valuewise(dtype=DTYPES, kind=list(KINDS))
def test_pages_are_the_pools_bytes_and_enter_another_bit_by_bit(kind, dtype):
    backend = KINDS[kind]
    here, there = two_layers(backend, dtype), two_layers(backend, dtype, seed=2)
    ours, theirs = BlockPages(here, [NAMES]), BlockPages(there, [NAMES])
    target = here[NAMES[0]]
    steps = Steps(target)
    steps.submit(built(target, [3, 1, 7, 9], 0, 40))
    sources, targets = np.array([7, 1, 3], np.int32), np.array([8, 2, 4], np.int32)

    following = built(target, [3, 1, 7, 9], 48, 1)
    queued = ours.queue_export(0, sources)
    steps.submit(following, *queued)
    rows = np.full((4, ours.page_bytes(0)), 7, np.uint8)  # room for one more
    rows[:3] = in_thread(lambda: page_rows(queued))
    settled = ours.export(0, sources)
    expected = [naive(here, NAMES, block) for block in sources]
    assert [row.tobytes() for row in rows[:3]] == expected
    assert pages_of(settled) == expected
    assert ours.page_bytes(0) == len(expected[0])
    np.testing.assert_array_equal(page_rows(settled, 1), rows[1:3])
    memory = np.full_like(rows, 9)
    found = page_rows(settled, 1, 2, memory)
    np.testing.assert_array_equal(found, rows[1:2])
    assert np.shares_memory(found, memory[:1]) and (memory[1:] == 9).all()

    before = [naive(there, NAMES, block) for block in range(12)]
    mine = there[NAMES[0]]
    built(mine, [5], 0, 9)  # written, and not handed to the device yet
    theirs.import_pages(0, targets, rows)
    rows[:] = 0  # free for other use
    for page, block in zip(expected, targets, strict=True):
        assert naive(there, NAMES, block) == page
    for block in {*range(12)} - {8, 2, 4, 5}:
        assert naive(there, NAMES, block) == before[block]
    assert naive(there, NAMES, 5) != before[5]


def test_parts_are_a_blocks_share_of_each_array_in_order():
    pages = BlockPages(two_layers(SCATTER, mx.int8), [NAMES, NAMES[1:]])
    wide = [PagePart((2, 16, 64), mx.int8, 2048), PagePart((2, 16), mx.bfloat16, 64)]
    narrow = [PagePart((3, 16, 32), mx.int8, 1536), PagePart((3, 16), mx.bfloat16, 96)]
    assert pages.parts(0) == (*wide, *wide, *narrow, *narrow)
    assert pages.parts(1) == (*narrow, *narrow)
    assert pages.page_bytes(1) == 2 * (1536 + 96)


@valuewise(
    case=["windows, one shape", "windows in both", "two windows"],
    dtype=[mx.bfloat16, mx.int8],
    backend=[KERNELS, SCATTER],
)
def test_groups_that_share_storages_have_pages_of_their_own(config, case, dtype, backend):
    """vLLM's planner places full layers, window layers and a draft network's."""
    layers, _ = CASES[case]
    specs = kv_cache_specs(layers, BLOCK, dtype)
    placed = planned(config, specs, 8 << 20)
    here, there = (allocate_kv_caches(placed, layers, BLOCK, dtype, backend) for _ in range(2))
    storages = dict.fromkeys(state.storage for state in here.values())
    for index, storage in enumerate(storages):
        fill(storage, index)
    group_of = groups_of(placed, layers)  # names of layers in packs included
    groups = [
        [name for name in group_of if group_of[name] == g]
        for g in range(len(placed.kv_cache_groups))
    ]
    assert len(groups) > 1 and len(storages) < len(here)
    ours, theirs = BlockPages(here, groups), BlockPages(there, groups)
    blocks = {g: np.array([1 + g, 9 + g], np.int32) for g in range(len(groups))}
    queued = {g: ours.queue_export(g, blocks[g]) for g in blocks}
    mx.async_eval(queued)
    for g, names in enumerate(groups):
        targets = blocks[g] + 20
        rows = page_rows(queued[g])
        theirs.import_pages(g, targets, rows)
        for index in range(2):
            page = naive(here, names, blocks[g][index])
            assert rows[index].tobytes() == page
            assert naive(there, names, targets[index]) == page
    moved = {int(block) + 20 for of_group in blocks.values() for block in of_group}
    for block in {*range(placed.num_blocks)} - moved:
        assert not any(naive(there, [name], block).strip(b"\0") for name in there)


def overwrite(target, draft, pages):
    return built(target, [7, 1], 0, 32, seed=9)


def clear(target, draft, pages):
    for state in (target, draft):
        state.begin_step()
        state.clear_blocks(np.array([1, 7], np.int32))


def copy(target, draft, pages):
    for state in (target, draft):
        state.begin_step()
        state.copy_blocks(np.array([2, 4], np.int32), np.array([7, 1], np.int32))


def import_others(target, draft, pages):
    pages.import_pages(0, np.array([7, 1]), page_rows(pages.export(0, np.array([2, 4]))))


@pairwise(
    later=[overwrite, clear, copy, import_others], dtype=[mx.bfloat16, mx.uint8], kind=list(KINDS)
)
def test_queued_copies_see_the_steps_before_and_nothing_later(kind, dtype, later):
    backend = KINDS[kind]
    states = two_layers(backend, dtype)
    target, draft = (states[name] for name in NAMES)
    pages, steps = BlockPages(states, [NAMES]), Steps(target)
    steps.submit(built(target, [7, 1, 9], 0, 33))
    target.begin_step()  # so that numpy sees what that step has written
    expected = [naive(states, NAMES, block) for block in (7, 1)]

    following = built(target, [7, 1, 9], 33, 1)
    queued = pages.queue_export(0, np.array([7, 1], np.int32))
    steps.submit(following, *queued)
    out = later(target, draft, pages)
    steps.submit(built(target, [5], 0, 3) if out is None else out)
    assert pages_of(queued) == expected
    target.wait_for_device()
    assert naive(states, NAMES[:1], 7) not in expected[0]


@pytest.mark.parametrize("backend", KINDS.values(), ids=KINDS)
def test_copies_of_several_exports_of_a_step_are_all_before_the_next_write(backend):
    states = two_layers(backend, mx.float16)
    target = states[NAMES[0]]
    pages, steps = BlockPages(states, [NAMES, NAMES[:1]]), Steps(target)
    expected = [naive(states, NAMES, 7), naive(states, NAMES[:1], 1)]
    following = built(target, [9], 0, 1)
    first, second = (
        pages.queue_export(group, np.array([block], np.int32)) for group, block in ((0, 7), (1, 1))
    )
    steps.submit(following, *first, *second)
    steps.submit(built(target, [7, 1], 0, 32))
    assert pages_of(first) + pages_of(second) == expected


@pytest.mark.parametrize("later", [overwrite, clear, copy])
@pytest.mark.parametrize("backend", [KINDS["kernels"], KINDS["limited"]])
def test_fences_order_a_write_behind_copies_that_are_not_handed_over_yet(backend, later):
    """The interpreter runs a write when it is built, so only its fence follows earlier copies."""
    states = two_layers(backend, mx.float16)
    target, draft = (states[name] for name in NAMES)
    pages = BlockPages(states, [NAMES])
    expected = [naive(states, NAMES, block) for block in (7, 1)]
    queued = pages.queue_export(0, np.array([7, 1], np.int32))
    later(target, draft, pages)
    assert naive(states, NAMES[:1], 7) not in expected[0]
    assert pages_of(queued) == expected


def graph_of(array, **named):
    """Returns the operations of an uncomputed graph, and each node's input nodes."""
    file = io.StringIO()
    mx.export_to_dot(file, array, **named)
    text = file.getvalue()
    labels = dict(re.findall(r"\{ (\d+) \[label =\"([^\"]+)\"", text))
    inputs = {}
    for source, node in re.findall(r"^\"?([^\s\"]+)\"? -> \"?([^\s\"]+)\"?$", text, re.M):
        inputs.setdefault(node, []).append(source)
    return labels, inputs


def ancestors(node, inputs):
    found, left = set(), [node]
    while left:
        for source in inputs.get(left.pop(), ()):
            if source not in found:
                found.add(source)
                left.append(source)
    return found


def test_on_a_gpu_a_copy_binds_what_writes_left_and_the_next_write_what_copies_left():
    """MLX's encoder orders dispatches by the arrays that they compute, and by nothing else.

    `mx.depends` gives out its inputs' buffers, so it orders what MLX hands over, not the GPU.
    """
    states = two_layers(KERNELS, mx.int8)
    target, draft = (states[name] for name in NAMES)
    mx.eval(built(target, [7, 1], 0, 20))
    draft.clear_blocks(np.array([3], np.int32))
    before = {f"f{i}": fence for i, fence in enumerate([*target.fences, *draft.fences])}
    assert len(before) == 2
    pools = {f"p{i}": array for i, array in enumerate([*target.arrays, *draft.arrays])}
    BlockPages(states, [NAMES]).queue_export(0, np.array([7, 1], np.int32))
    (after,) = target.fences
    assert draft.fences[0] is after
    labels, inputs = graph_of(after, **before, **pools)
    assert "Depends" not in labels.values()
    gathers = {node for node, label in labels.items() if label == "Gather"}
    assert len(gathers) == len(pools) == 8
    read = set()
    for gather in gathers:
        pool, indices = inputs[gather]
        read |= ancestors(pool, inputs)
        assert before.keys() <= ancestors(indices, inputs)
    assert pools.keys() <= read


@valuewise(kind=list(KINDS), dtype=[mx.bfloat16, mx.int8])
def test_pages_move_amid_steps_without_a_copy_of_the_pool(kind, dtype):
    backend = KINDS[kind]
    states = {
        f"layers.{index}": make(backend, dtype, num_blocks=8192 // dtype.size) for index in range(2)
    }
    names, layers = list(states), list(states.values())
    mx.eval([state.arrays for state in layers])
    pages = BlockPages(states, [names])
    one_array = layers[0].arrays[0].nbytes
    assert sum(array.nbytes for state in layers for array in state.arrays) >= 64 << 20
    blocks, others = np.arange(1, 9), np.arange(20, 28)
    moved = 8 * pages.page_bytes(0)
    arrays = [array for state in layers for array in state.arrays]
    steps = Steps(layers[0])

    def step(start, exports=False):
        out = [built(state, [*range(1, 9)], start, 1) for state in layers]
        queued = pages.queue_export(0, blocks) if exports else []
        steps.submit(*out, *queued)
        return queued

    def peak_from(first):
        """Returns the peak memory, in bytes, of steps that export and import pages."""
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for start in range(first, first + 12, 4):
            queued = step(start, exports=True)
            step(start + 1)
            rows = in_thread(lambda exported=queued: page_rows(exported))
            exported = pages.export(0, blocks)
            for state in layers:
                state.wait_for_device()
            # The last step's writes are there.
            assert pages_of(exported)[0] == naive(states, names, 1)
            step(start + 2)
            pages.import_pages(0, others, rows)
            step(start + 3)
            mx.synchronize()
        return mx.get_peak_memory() - before

    step(0), step(1)
    # Now and then MLX lets go of an array a moment after it says that it has waited for it.
    most = 3 * moved + one_array / 4
    assert any(peak_from(first) < most for first in range(2, 62, 12))
    assert 3 * moved < one_array / 4
    if backend.pipelined:  # kernels hold them as inputs
        now = [array for state in layers for array in state.arrays]
        assert all(array is then for array, then in zip(now, arrays, strict=True))


@pytest.mark.parametrize("backend", KINDS.values(), ids=KINDS)
def test_an_idle_engine_keeps_no_copies(backend):
    states = two_layers(backend, mx.float16)
    pages = BlockPages(states, [NAMES])
    mx.eval(built(states[NAMES[0]], [3, 1], 0, 20))
    mx.eval([state.arrays for state in states.values()])
    mx.clear_cache()
    before = mx.get_active_memory()
    queued = pages.queue_export(0, np.arange(1, 11))
    mx.eval(queued)
    held = mx.get_active_memory() - before
    del queued
    assert held >= 10 * pages.page_bytes(0)
    assert mx.get_active_memory() - before < held / 10


def rows_of(pages, group, count):
    return np.zeros((count, pages.page_bytes(group)), np.uint8)


def test_rows_that_are_not_the_groups_pages_are_refused_by_what_they_are():
    pages = BlockPages(two_layers(SCATTER, mx.bfloat16), [NAMES, NAMES[1:]])
    few, size = rows_of(pages, 1, 2), pages.page_bytes(1)
    blocks = np.array([1, 2, 3])
    with pytest.raises(ValueError, match=rf"rows: expected \(3, {size}\).* found \(2, {size}\)"):
        pages.import_pages(1, blocks, few)
    other = rows_of(pages, 0, 3)
    with pytest.raises(ValueError, match=rf"rows: expected \(3, {size}\).* found \(3, "):
        pages.import_pages(1, blocks, other)
    for rows in (other[:, :size], rows_of(pages, 1, 6)[::2], np.asfortranarray(other)):
        with pytest.raises(ValueError, match="rows: expected contiguous uint8"):
            pages.import_pages(1, blocks, rows)
    with pytest.raises(ValueError, match="rows: expected contiguous uint8, found uint16"):
        pages.import_pages(1, blocks, rows_of(pages, 1, 3).view(np.uint16))
    with pytest.raises(ValueError, match=rf"rows: expected .* found \({3 * size},\)"):
        pages.import_pages(1, blocks, rows_of(pages, 1, 3).reshape(-1))


@pytest.mark.parametrize("block", [-1, 12])
def test_blocks_that_the_pool_has_not_are_refused(block):
    pages = BlockPages(two_layers(SCATTER, mx.float16), [NAMES])
    blocks, message = np.array([3, block]), f"block {block} is not one of the pool's 12"
    for call in (pages.queue_export, pages.export):
        with pytest.raises(ValueError, match=message):
            call(0, blocks)
    with pytest.raises(ValueError, match=message):
        pages.import_pages(0, blocks, rows_of(pages, 0, 2))


FLOATS = [mx.float32, mx.float16, mx.bfloat16, mx.uint8]
CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def finite_codes(codes, dtype):
    """Returns which numbers are finite, decoded by numpy or torch."""
    if dtype == mx.bfloat16:
        return np.isfinite((codes.astype(np.uint32) << 16).view(np.float32))
    if dtype == mx.uint8:
        numbers = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn)
        return np.isfinite(numbers.to(torch.float32).numpy())
    return np.isfinite(codes.view(np.float16 if dtype == mx.float16 else np.float32))


def part_of(count, dtype):
    return PagePart((count,), dtype, count * dtype.size)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.uint8], ids=str)
def test_every_code_is_told_finite_or_not(dtype):
    codes = np.arange(256**dtype.size).astype(CODES[dtype.size])
    rows = codes.view(np.uint8).reshape(-1, dtype.size)  # a page is one number
    found = finite_rows([part_of(1, dtype)], rows)
    np.testing.assert_array_equal(found, finite_codes(codes, dtype))


@given(st.data())
def test_a_page_is_finite_if_all_its_numbers_are(data):
    """Random finite numbers, with an arbitrary one now and then; parts of odd sizes."""
    parts, columns = [], []
    expected = np.ones(data.draw(st.integers(1, 4)), bool)
    for _ in range(data.draw(st.integers(1, 5))):
        dtype = data.draw(st.sampled_from([*FLOATS, mx.int8]))
        count = data.draw(st.integers(1, 300))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        shape = (len(expected), count)
        codes = rng.integers(0, 256, (shape[0], count * dtype.size), np.uint8)
        codes = codes.view(CODES[dtype.size])
        if dtype != mx.int8:
            codes[~finite_codes(codes.reshape(-1), dtype).reshape(shape)] = 0
            if data.draw(st.booleans()):
                page = data.draw(st.integers(0, shape[0] - 1))
                place = data.draw(st.integers(0, count - 1))
                special = {1: [0x7F, 0xFF, 0x7E], 2: [0x7C00, 0xFF80, 0x7F80, 0x7BFF, 0xFFFF]}
                special[4] = [0x7F800000, 0xFF800001, 0x7F7FFFFF, 0xFFFFFFFF, 0x7F800001]
                codes[page, place] = data.draw(st.sampled_from(special[dtype.size]))
            expected &= finite_codes(codes.reshape(-1), dtype).reshape(shape).all(axis=1)
        parts.append(part_of(count, dtype))
        columns.append(codes.view(np.uint8))
    found = finite_rows(parts, np.concatenate(columns, axis=1))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_is_none_is_found_wherever_it_lies_in_a_page(dtype):
    pages = BlockPages(two_layers(SCATTER, dtype), [NAMES])
    rows, parts = rows_of(pages, 0, 3), pages.parts(0)
    assert finite_rows(parts, rows).all()
    rng, start = np.random.default_rng(0), 0
    for part in parts:
        codes = rows[1, start : start + part.nbytes].view(CODES[part.dtype.size])
        start += part.nbytes
        for place in (0, len(codes) - 1, *rng.integers(0, len(codes), 5)):
            codes[place] = np.iinfo(codes.dtype).max  # NaN in every format
            assert finite_rows(parts, rows).tolist() == [True, part.dtype == mx.int8, True]
            codes[place] = 0
    assert start == rows.shape[1]
