# SPDX-License-Identifier: Apache-2.0
"""Passes by graphs equal the network's Python, with few waits for the device."""

import mlx.core as mx
import numpy as np
import pytest
from engine.spec_decode.test_draft_model import BLOCK, VOCAB, Bench, K
from hypothesis import given
from hypothesis import strategies as st

from metal_kernels import kernel
from tests.metal_kernels.doubles import Digesting
from vllm_metal.engine.batch.outputs import Unread
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.scatter import ScatterKVCache
from vllm_metal.engine.spec_decode.passes import evened
from vllm_metal.engine.spec_decode.proposer import DraftRequest
from vllm_metal.engine.spec_decode.spans import Spans

NUM_STEPS = 14
LENGTHS = (3, 15, 33)
#: The stand-in kernels take time by the size of their pool.
OVER_KERNELS = {"backend": KERNELS, "num_blocks": 32, "num_layers": 2}


def begin_all(bench):
    for req_idx, length in enumerate(LENGTHS):
        bench.begin(req_idx, bench.prompt(length))
    return list(range(len(LENGTHS)))


def drafted(bench, unlike):
    """Returns all drafts of some steps, each with any number accepted.

    Args:
        unlike: whether requests want different numbers of drafts.
    """
    requests, found, rng = begin_all(bench), [], np.random.default_rng(3)
    for _ in range(NUM_STEPS):
        limits = rng.integers(0, K + 1, len(requests)) if unlike else [K] * len(requests)
        found.append(bench.propose(requests, limits))
        for req_idx, drafts in zip(requests, found[-1], strict=True):
            accepted = int(rng.integers(0, len(drafts) + 1))
            bench.learn(req_idx, [*drafts[:accepted], int(rng.integers(0, VOCAB))])
    return found


@pytest.mark.parametrize("unlike", [pytest.param(False, marks=pytest.mark.slow), True])
def test_drafts_by_graphs_are_those_of_passes_in_python(unlike):
    by_graphs, in_python = (Bench(allowed=allowed) for allowed in (True, False))
    found = drafted(by_graphs, unlike)
    assert found == drafted(in_python, unlike)
    assert len({token for step in found for drafts in step for token in drafts}) > 10
    passes = by_graphs.graphs.num_built
    assert in_python.graphs.num_built == 0
    assert passes > 0.4 * in_python.network.passes
    for req_idx in range(len(LENGTHS)):  # and they are what the model says
        (drafts,) = by_graphs.propose([req_idx], [K])
        by_graphs.check(req_idx, drafts)


@pytest.mark.parametrize("unlike", [pytest.param(False, marks=pytest.mark.slow), True])
def test_drafts_by_graphs_over_kernels_are_those_of_passes_in_python(unlike, monkeypatch):
    """The stand-in kernels' results depend on all inputs, past fences included."""
    monkeypatch.setattr(mx.fast, "metal_kernel", Digesting().metal_kernel)
    with kernel.using(mx.fast.metal_kernel):
        benches = [Bench(allowed=allowed, **OVER_KERNELS) for allowed in (True, False)]
        found = [drafted(bench, unlike) for bench in benches]
    assert found[0] == found[1]
    assert len({token for step in found[0] for drafts in step for token in drafts}) > 3
    assert benches[0].graphs.num_built > 0.6 * benches[1].network.passes


def unread_drafts(bench):
    """Returns drafts of steps whose outcome only the device knows."""
    requests, found, rng = begin_all(bench), [], np.random.default_rng(5)
    here = np.array(requests, np.int32)
    bench.propose(requests, [K] * len(here))
    for _ in range(NUM_STEPS // 2):
        sampled = rng.integers(0, VOCAB, (len(here), K + 1)).astype(np.int32)
        rejected = rng.integers(0, K + 1, len(here)).astype(np.int32)
        unread = Unread(
            np.full(len(here), K + 1, np.int32),
            here * (K + 1),
            mx.array(sampled.ravel()),
            mx.array(rejected),
            mx.array(sampled[np.arange(len(here)), K - rejected]),
        )
        limits = np.full(len(here), K, np.int32)
        request = DraftRequest(
            bench.token_ids_np, here, bench.known[here], limits, bench.known[here], unread
        )
        found.append(np.array(bench.proposer.propose(request).token_ids).tolist())
        for req_idx, tokens, count in zip(requests, sampled, rejected, strict=True):
            bench.learn(req_idx, tokens[: K + 1 - count].tolist())
    return found


@pytest.mark.more
def test_graphs_start_where_the_device_knows_the_newest_token_to_be(monkeypatch):
    monkeypatch.setattr(mx.fast, "metal_kernel", Digesting().metal_kernel)
    with kernel.using(mx.fast.metal_kernel):
        benches = [Bench(allowed=allowed, **OVER_KERNELS) for allowed in (True, False)]
        found = [unread_drafts(bench) for bench in benches]
    assert found[0] == found[1]
    assert benches[0].graphs.num_built > 0.6 * benches[1].network.passes


def waits(monkeypatch):
    """Returns a list that grows with each wait for the device."""
    made, evaluate = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (made.append(len(arrays)), evaluate(*arrays)))
    return made


def test_waits_do_not_grow_with_the_number_of_passes(monkeypatch):
    bench = Bench()
    requests = begin_all(bench)
    made = waits(monkeypatch)
    bench.propose(requests, [K] * 3)
    assert len(made) == 2  # prompts, and all passes after them
    for req_idx in requests:
        bench.learn(req_idx, [req_idx])
    made.clear()
    bench.propose(requests, [K, 2, 1])
    assert len(made) == 1  # passes of one row each, the first among them


def test_nothing_waits_over_kernels(monkeypatch):
    monkeypatch.setattr(mx.fast, "metal_kernel", Digesting().metal_kernel)
    with kernel.using(mx.fast.metal_kernel):
        bench = Bench(**OVER_KERNELS)
        requests = begin_all(bench)
        made = waits(monkeypatch)
        for _ in range(4):
            bench.propose(requests, [K] * 3)
            for req_idx in requests:
                bench.learn(req_idx, [1])
    assert not made


@pytest.mark.parametrize(("windowed", "accepted"), [(False, K), (True, 0)])
def test_k_v_are_written_as_far_as_a_request_has_room_and_no_further(windowed, accepted):
    """All but block 0, which belongs to no request."""
    bench = Bench(windowed)
    for req_idx, length in ((0, 20), (1, 2 * BLOCK - 3)):
        bench.begin(req_idx, bench.prompt(length))
    limits = [K, 2]
    found = bench.propose([0, 1], limits)
    for req_idx, drafts in enumerate(found):
        bench.learn(req_idx, [*drafts[: min(accepted, limits[req_idx])], 5])
    pools = [state for state in bench.paged.layer_states if isinstance(state, ScatterKVCache)]
    before = [slots_of(pool) for pool in pools]
    known = bench.known.copy()
    bench.propose([0, 1], limits)
    changed = [slots_of(pool) != old for pool, old in zip(pools, before, strict=True)]
    for of_layer in changed:
        written = set(np.flatnonzero(of_layer.any(axis=(0, 2))).tolist())
        allowed = {
            int(bench.tables.tables_np[0][req_idx, position // BLOCK]) * BLOCK + position % BLOCK
            for req_idx, limit in enumerate(limits)
            for position in range(known[req_idx] - 2, known[req_idx] + limit - 1)
        }
        newest = {
            int(bench.tables.tables_np[0][req_idx, position // BLOCK]) * BLOCK + position % BLOCK
            for req_idx, limit in enumerate(limits)
            for position in range(known[req_idx] - 1, known[req_idx] + limit - 1)
        }
        assert newest <= {slot for slot in written if slot >= BLOCK} <= allowed


def slots_of(pool):
    """Returns [Hkv, slots, D] keys after all writes."""
    pool.begin_step()
    return np.array(pool.keys.elements).reshape(pool.keys.elements.shape[0], -1, 64)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=6),
)
def test_spans_are_evened_by_rows_before_them(requests):
    starts, lens = np.array(requests, np.int32).T
    spans = Spans(np.arange(len(lens), dtype=np.int32), starts, starts + lens)
    even, places = evened(spans)
    np.testing.assert_array_equal(even.ends_np, spans.ends_np)
    np.testing.assert_array_equal(places[places >= 0], np.arange(lens.sum()))
    np.testing.assert_array_equal(even.positions_np[places >= 0], spans.positions_np)
    np.testing.assert_array_equal(even.index_np[places >= 0], spans.index_np)
    assert (even.positions_np >= 0).all() and len(places) <= 2 * lens.sum()
    if len(lens) * lens.max() <= 2 * lens.sum() and (starts + lens >= lens.max()).all():
        assert set(np.diff(even.query_start_loc_np)) == {lens.max()}
