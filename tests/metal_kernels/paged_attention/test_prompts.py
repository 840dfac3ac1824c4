# SPDX-License-Identifier: Apache-2.0
"""Prompts over gathered contexts, against the formula; stale pool data is ignored."""

from types import SimpleNamespace

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from pairs import pairwise, valuewise

from metal_kernels import kernel, kv_gather
from metal_kernels.op_common import FENCE_DTYPE, FENCE_SHAPE
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionShape, fused, prompts
from tests.metal_kernels.paged_attention.batches import expected, make_batch
from tests.metal_kernels.paged_attention.whole_tiles import TILE, WholeTiles

SHAPE = AttentionShape(4, 2, 64, 64)
UNEVEN = AttentionShape(4, 2, 96, 64)
REQUESTS = [(0, 70), (37, 64), (150, 26), (9, 16)]  # the last sees a key beyond windows of 24
FENCE = mx.zeros(FENCE_SHAPE, FENCE_DTYPE)


def attend(batch, window=None, sinks=None, compiler=metal_interpreter.metal_kernel, **options):
    given = (batch.starts, batch.seq_lens, batch.tables, 16, batch.shape, window)
    plan = prompts.plan(*given, **options)
    assert plan.num_tokens == len(batch.queries)
    with kernel.using(compiler):
        out, reads = prompts.run(
            *(plan, batch.queries, batch.key_pool, batch.value_pool, FENCE, 0.1, None, sinks),
            *(batch.key_scales, batch.value_scales, Pace()),
        )
        mx.eval(out, reads)
    return np.array(out.astype(mx.float32)), plan


def batch_of(requests=REQUESTS, shape=SHAPE, dtype=mx.float32, cache=None, block_size=16):
    rng = np.random.default_rng(0)
    return make_batch(rng, requests, shape, dtype, cache, block_size)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> WholeTiles:
    double = WholeTiles()
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", double.attend)
    monkeypatch.setattr(kv_gather, "gather", double.gather)
    return double


#: Shapes, caches and sizes of blocks.
POOLS = {
    "values": (SHAPE, None, 16),
    "96 and 64": (UNEVEN, None, 32),
    "fp8": (SHAPE, mx.uint8, 16),
    "int8": (SHAPE, mx.int8, 32),
}


@pairwise(pool=list(POOLS), window=[None, 24, 90, 1], with_sinks=[False, True])
def test_rows_attend_as_the_formula_says_beside_nan(tiles, pool, window, with_sinks):
    """Slots without a request hold NaN, and MLX's kernel reads whole tiles."""
    shape, cache, block_size = POOLS[pool]
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    batch = batch_of(shape=shape, cache=cache, block_size=block_size)
    given = (batch.starts, batch.seq_lens, batch.tables, block_size, shape, window)
    plan = prompts.plan(*given)
    with kernel.using(metal_interpreter.metal_kernel):
        out, _ = prompts.run(
            *(plan, batch.queries, batch.key_pool, batch.value_pool, FENCE, 0.1, None, sinks),
            *(batch.key_scales, batch.value_scales),
        )
    wanted = expected(batch, 0.1, window, sinks=sinks)
    np.testing.assert_allclose(np.array(out), wanted, atol=1e-5)
    assert any(call["k"][2] % TILE for call in tiles.calls)  # so that a tile has more


@pytest.mark.parametrize("window", [None, 24])
def test_the_double_shows_what_the_zeros_are_for(tiles, monkeypatch, window):
    gather = tiles.gather
    monkeypatch.setattr(kv_gather, "gather", lambda *args: gather(*args[:5], None, args[6]))
    out, _ = attend(batch_of(), window)
    assert np.isnan(out).any()


@valuewise(dtype=[mx.float32, mx.float16, mx.bfloat16], window=[None, 24, 90])
def test_mlx_answers_as_the_formula_does(dtype, window):
    """MLX's own attention sums in float32."""
    batch = batch_of(dtype=dtype)
    found, _ = attend(batch, window)
    tolerance = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(found, expected(batch, 0.1, window), atol=tolerance)


def test_what_mlx_has_a_fused_kernel_for_is_not_plain(monkeypatch):
    """States what the GPU's kernels accept, because a CPU has none."""
    wide = AttentionShape(4, 2, 512, 512)
    assert not fused.is_plain(wide, mx.float16, None)
    gpu = SimpleNamespace(type=mx.DeviceType.gpu)
    monkeypatch.setattr(mx, "default_device", lambda: gpu)
    monkeypatch.setattr(fused, "is_fused", lambda key_size, *_: key_size < 512)
    assert fused.is_plain(wide, mx.float16, None)
    assert not fused.is_plain(SHAPE, mx.float16, None) and fused.is_plain(SHAPE, mx.float16, 30.0)
    assert fused.is_plain(AttentionShape(4, 1, 576, 512), mx.float16, None)


#: Layers that MLX has no fused kernel for on a GPU: shape, soft cap, cache, blocks.
PLAIN = {
    "cap": (SHAPE, 2.0, None, 16),
    "cap, 96 and 64": (UNEVEN, 30.0, mx.int8, 32),
    "512": (AttentionShape(4, 2, 512, 512), None, mx.uint8, 16),
    "latents": (AttentionShape(6, 1, 576, 512), None, None, 16),
    "latents, fp8": (AttentionShape(6, 1, 576, 512), None, mx.uint8, 32),
}


@pairwise(
    layer=list(PLAIN),
    window=[None, 24, 90, 1],
    with_sinks=[False, True],
    most=[2**20, 1500],
    dtype=[mx.float32, mx.bfloat16],
)
def test_plain_operations_answer_as_the_formula_does(
    monkeypatch, layer, window, with_sinks, most, dtype
):
    """Beside NaN in free slots, in as many calls as the scores allow."""
    shape, softcap, cache, block_size = PLAIN[layer]
    monkeypatch.setattr(prompts, "is_plain", lambda *_: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", None)
    monkeypatch.setattr(prompts, "MAX_SCORES", most)
    sizes: list[int] = []
    softmax = mx.softmax

    def noted(scores, **options):
        sizes.append(scores[0, 0, 0].size)
        return softmax(scores, **options)

    monkeypatch.setattr(mx, "softmax", noted)
    sinks = mx.array(np.linspace(-1, 2, shape.num_heads).astype(np.float32)) if with_sinks else None
    batch = batch_of(shape=shape, dtype=dtype, cache=cache, block_size=block_size)
    given = (batch.starts, batch.seq_lens, batch.tables, block_size, shape, window)
    with kernel.using(metal_interpreter.metal_kernel):
        out, _ = prompts.run(
            *(prompts.plan(*given, force_fused=False), batch.queries),
            *(batch.key_pool, batch.value_pool, FENCE, 0.1, softcap, sinks),
            *(batch.key_scales, batch.value_scales, Pace()),
        )
    wanted = expected(batch, 0.1, window, softcap, sinks)
    largest = max(np.abs(values).max() for _, values in batch.contexts)
    tolerance = 1e-5 if dtype == mx.float32 else 0.03
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), wanted, atol=tolerance * largest)
    assert max(sizes) <= most


def test_what_lies_before_a_window_is_not_read(tiles):
    """Freed blocks, and the start of the first visible block."""
    window, requests = 24, [(150, 20)]
    batch = batch_of(requests)
    wanted = expected(batch, 0.1, window)
    unseen = np.arange(150 - window + 1)
    at = batch.tables[0][unseen // 16], unseen % 16
    for pool in (batch.key_pool, batch.value_pool):
        pool[:, mx.array(at[0]), mx.array(at[1])] = float("nan")
    batch.tables[0][: unseen[-1] // 16] = -1
    found, _ = attend(batch, window)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(("window", "most"), [(None, 64), (24, 24), (90, 64)])
def test_calls_have_no_more_rows_than_a_window_or_their_work_allows(window, most):
    batch = batch_of([(300, 200)])
    plan = prompts.plan(
        *(batch.starts, batch.seq_lens, batch.tables, 16, SHAPE, window),
        force_fused=True,
        most_work=1,
    )
    (prompt,) = plan.prompts
    counts = [piece.num_rows for piece in prompt.pieces]
    assert sum(counts) == 200 and len(counts) == -(-200 // most)
    assert max(counts) - min(counts) <= 1
    assert [piece.first for piece in prompt.pieces] == [0, *np.cumsum(counts)[:-1].tolist()]
    found = batch_of([(300, 200)])
    out, _ = attend(found, window, force_fused=False, most_work=1)
    np.testing.assert_allclose(out, expected(found, 0.1, window), atol=1e-5)
    if window is not None:  # keys in reach alone, under one mask
        most_keys = max(piece.end - piece.begin for piece in prompt.pieces)
        assert most_keys == window + max(counts) - 1
        assert len({id(piece.mask) for piece in prompt.pieces}) == len(set(counts))


@pytest.mark.parametrize("window", [None, 17, 128])
def test_no_kernel_is_forced_for_rows_so_few_that_mlx_may_have_none(window):
    """MLX would raise: for up to eight rows, it takes at most 32 query rows."""
    for num_rows in range(17, 400, 5):
        starts, lens = np.array([0, num_rows], np.int32), np.array([num_rows + 300], np.int32)
        table = np.zeros((1, 50), np.int32)
        plan = prompts.plan(starts, lens, table, 16, SHAPE, window, True, most_work=1)
        assert min(piece.num_rows for piece in plan.prompts[0].pieces) > 8


@pytest.mark.parametrize("window", [None, 24])
def test_heads_have_their_contexts_in_turns_past_a_bound(monkeypatch, window):
    ends: list[int] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: ends.append(mx.eval(*arrays) or 1))
    batch = batch_of(shape=AttentionShape(6, 3, 64, 64))
    wanted, _ = attend(batch, window)
    assert not ends
    monkeypatch.setattr(prompts, "GATHERED_AT_ONCE", 2 * 80 * 2 * 64 * 4)
    checker = metal_interpreter.Checker()
    found, _ = attend(batch, window, compiler=checker.metal_kernel)
    np.testing.assert_array_equal(found, wanted)
    gathered = [dispatch.buffers["context"].written_bytes for dispatch in checker.dispatches]
    if window is None:  # 80 slots: two heads and one; 112 and 176: each by itself; 32: all
        assert len(gathered) == 2 * (2 + 3 + 3 + 1) and len(ends) == 8
    longest = 176 * 2 * 64 * 4  # of one head
    for keys, values in zip(gathered[::2], gathered[1::2], strict=True):
        assert keys + values <= max(prompts.GATHERED_AT_ONCE, longest)


@pytest.mark.parametrize(("rows", "group"), [(64, 1), (200, 1), (64, 4)])
def test_a_context_is_read_once_and_written_once(rows, group, monkeypatch):
    """All calls together move twice the context, and their own rows."""
    monkeypatch.setattr(prompts, "MAX_SCORES", 64 * (500 + rows))
    shape = AttentionShape(2 * group, 2, 128, 128)
    batch = batch_of([(500, rows)], shape, mx.float16)
    checker = metal_interpreter.Checker()
    _, plan = attend(batch, compiler=checker.metal_kernel)
    assert len(plan.prompts[0].pieces) == -(-rows // 64)
    assert {dispatch.kernel for dispatch in checker.dispatches} == {"kv_gather"}
    pool = sum(dispatch.buffers["pool"].read_bytes for dispatch in checker.dispatches)
    context = sum(dispatch.buffers["context"].written_bytes for dispatch in checker.dispatches)
    least = (500 + rows) * 2 * 2 * 128 * 2  # heads, K and V, elements, bytes
    own = 2 * rows * 2 * group * 128 * 2
    assert pool == least
    assert pool + context <= 2 * least + own
