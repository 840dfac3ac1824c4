# SPDX-License-Identifier: Apache-2.0
"""Chosen positions, and attention to them, equal a naive search and softmax in float64."""

from contextlib import nullcontext
from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import kernel
from metal_kernels.layout import PositionLag
from vllm_metal.engine.attention import sparse
from vllm_metal.engine.attention.attention_layer import AttentionLayer
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.sparse_tokens import ABSENT
from vllm_metal.patches.mlx_patches.seam import Scoring

BLOCK, NUM_BLOCKS, TOPK, HEADS, SIZE = 16, 24, 8, 3, 16
#: Tokens of each request in the step, and in its context: decodes, a prompt that begins with fewer
#: than TOPK positions, drafts, a request that attends to all.
REQUESTS = [(1, 70), (20, 23), (4, 41), (3, 8), (1, 9)]
LATENTS = AttentionLayer("layers.0.0", 2, 1, 20, None, value_size=16, latent=True, topk=TOPK)
INDEX = IndexLayer.of("layers.0.1", HEADS, SIZE, TOPK)
SINKS = np.array([0.7, -1.5], np.float32)  # of each head of the latents


@pytest.fixture(params=["scatter", "kernels"])
def backend(request):
    ours = request.param == "kernels"
    with kernel.using(metal_interpreter.metal_kernel) if ours else nullcontext():
        yield KERNELS if ours else SCATTER


@pytest.mark.parametrize("count", [1, 5, 12])
def test_of_equal_scores_the_first_are_chosen(count):
    rng = np.random.default_rng(count)
    scores = rng.integers(0, 4, (6, 5, 12)).astype(np.float32)
    scores[0, 0], scores[1, :, 4:] = 2.0, -np.inf
    values = np.broadcast_to(np.arange(100, 112, dtype=np.int32), scores.shape)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    seen = np.take_along_axis(scores, order, -1) > -np.inf
    expected = np.sort(np.where(seen, order + 100, 1000))
    expected[expected == 1000] = ABSENT
    found = sparse.largest(mx.array(scores), mx.array(values), count)
    assert np.array_equal(found, expected)


def layout_of(requests):
    lens, seq_lens = (np.array(part, np.int32) for part in zip(*requests, strict=True))
    blocks = np.random.default_rng(1).permutation(np.arange(1, NUM_BLOCKS)).astype(np.int32)
    tables = np.zeros((len(requests), -(-seq_lens.max() // BLOCK)), np.int32)
    for row, length in zip(tables, seq_lens, strict=True):
        width = -(-length // BLOCK)
        row[:width], blocks = blocks[:width], blocks[width:]
    slots = np.concatenate(
        [
            slots_of(table, np.arange(length - count, length))
            for table, count, length in zip(tables, lens, seq_lens, strict=True)
        ]
    )
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    return StepLayout(starts, seq_lens, tables, slots.astype(np.int32), BLOCK)


def slots_of(table, positions):
    return table[positions // BLOCK] * BLOCK + positions % BLOCK


class Layers:
    """An indexer's keys and latents of the requests, in a pool whose other rows are NaN."""

    def __init__(self, backend, layout, sinks=None):
        self.layout, self.sinks, rng = layout, sinks, np.random.default_rng(0)
        shape = NUM_BLOCKS * BLOCK
        self.keys = rng.normal(size=(shape, SIZE)).astype(np.float32)
        self.latents = rng.normal(size=(shape, LATENTS.head_size)).astype(np.float32)
        self.caches, self.scopes = [], []
        for layer, rows in ((INDEX, self.keys), (LATENTS, self.latents)):
            cache = layer.allocate(NUM_BLOCKS, BLOCK, mx.float32, backend)
            pool = np.full(cache.arrays[0].shape, np.nan, np.float32).reshape(shape, -1)
            held = self.written_before()
            pool[held] = rows[held]
            cache.arrays = [mx.array(pool.reshape(cache.arrays[0].shape))]
            mx.eval(cache.arrays)
            self.caches.append(cache)
            self.scopes.append(layer.scope(cache))

    def keep_only_latents(self, slots):
        """Leaves NaN in all other rows of the latents' pool."""
        cache = self.caches[1]
        cache.wait_for_device()
        pool = np.full(cache.arrays[0].shape, np.nan, np.float32)
        pool.reshape(len(self.latents), -1)[slots] = self.latents[slots]
        cache.arrays = [mx.array(pool)]
        mx.eval(cache.arrays)

    def written_before(self):
        lens = np.diff(self.layout.query_start_loc_np)
        return np.concatenate(
            [
                slots_of(table, np.arange(length - count))
                for table, length, count in zip(
                    self.layout.block_tables_np, self.layout.seq_lens_np, lens, strict=True
                )
            ]
        )

    def run(self, queries, weights, positions, latent_queries):
        """Places chosen by each token, and its output, of those that choose."""
        index, latents = self.caches
        plans = [scope.plan_of(self.layout) for scope in self.scopes]
        slots = self.layout.slot_mapping_np
        for cache, plan, rows in zip(
            self.caches, plans, (self.keys[slots], self.latents[slots]), strict=True
        ):
            written = mx.array(rows)[:, None]
            cache.write(plan, written, written)
        tokens = plans[0].sparse
        given = mx.array(queries), mx.array(weights), mx.array(positions)
        places = sparse.choose(index, plans[0], tokens, *given, TOPK)
        rows = plans[1].sparse.of_all(mx.array(latent_queries))
        scoring = Scoring(0.5, None if self.sinks is None else mx.array(self.sinks))
        out = sparse.attend(latents, plans[1], rows, places, scoring, None)
        return np.array(tokens.of_all(mx.arange(len(slots)))), np.array(places), np.array(out)


def expected_of(layers, table, position, query, weights, latent_query):
    """A token's chosen positions, and its output, by a loop over its context."""
    slots = slots_of(table, np.arange(position + 1))
    products = np.maximum(layers.keys[slots].astype(np.float64) @ query.T, 0)
    chosen = np.sort(np.argsort(-(products @ weights), kind="stable")[:TOPK])
    rows = layers.latents[slots[chosen]].astype(np.float64)
    scores = 0.5 * latent_query @ rows.T
    shares = np.exp(scores)
    total = shares.sum(-1, keepdims=True)
    if layers.sinks is not None:
        total += np.exp(layers.sinks[:, None])
    return chosen, shares / total @ rows[:, :16]


def check(layers, owners, positions, given, results):
    """`owners`: each token's request; the places are slots, or rows that the step writes."""
    queries, weights, latent_queries = given
    tokens, places, out = results
    written = layers.layout.slot_mapping_np
    for token, place, found in zip(tokens.tolist(), places, out, strict=True):
        table = layers.layout.block_tables_np[owners[token]]
        chosen, expected = expected_of(
            *(layers, table, positions[token]),
            *(part[token].astype(np.float64) for part in (queries, weights, latent_queries)),
        )
        slots = np.where(place < ABSENT, written[np.maximum(ABSENT - 1 - place, 0)], place)
        assert np.array_equal(slots[: len(chosen)], slots_of(table, chosen))
        assert (place[len(chosen) :] == ABSENT).all()
        np.testing.assert_allclose(found, expected, atol=1e-5)


def inputs_of(num_tokens):
    rng = np.random.default_rng(3)
    sizes = (HEADS, SIZE), (HEADS,), (LATENTS.num_heads, LATENTS.head_size)
    return [rng.normal(size=(num_tokens, *size)).astype(np.float32) for size in sizes]


@pytest.mark.parametrize(("most_scores", "sinks"), [(sparse.MAX_SCORES, None), (600, SINKS)])
def test_a_step_of_prompts_drafts_and_decodes(backend, most_scores, sinks, monkeypatch):
    """Also by calls of few rows. Rows of the pool that nobody chose are NaN."""
    monkeypatch.setattr(sparse, "MAX_SCORES", most_scores)
    monkeypatch.setattr(sparse, "MAX_BYTES", 100 * most_scores)
    layout = layout_of(REQUESTS)
    layers, lens = Layers(backend, layout, sinks), np.diff(layout.query_start_loc_np)
    owners = np.repeat(np.arange(len(lens)), lens)
    positions = np.arange(len(owners)) + np.repeat(
        layout.seq_lens_np - layout.query_start_loc_np[1:], lens
    )
    given = queries, weights, latent_queries = inputs_of(len(owners))
    results = layers.run(queries, weights, positions.astype(np.int32), latent_queries)
    assert np.array_equal(np.sort(results[0]), np.flatnonzero(positions >= TOPK))
    check(layers, owners, positions, given, results)
    chosen = np.unique(results[1][results[1] >= 0])
    layers.keep_only_latents(chosen)
    (_, places, out) = layers.run(queries, weights, positions.astype(np.int32), latent_queries)
    assert np.array_equal(places, results[1]) and np.array_equal(out, results[2])


def test_positions_that_only_the_device_knows():
    """The host counts three drafts that were rejected: one token then has fewer than TOPK."""
    with kernel.using(metal_interpreter.metal_kernel):
        layout = layout_of([(1, 40), (1, 9), (2, 30)])
        lag = np.array([3, 3, 0], np.int32)
        true = replace(layout, seq_lens_np=layout.seq_lens_np - lag)
        positions = np.array([36, 5, 28, 29])
        owners = np.array([0, 1, 2, 2])
        slots = [
            slots_of(layout.block_tables_np[owner], np.array([position]))
            for owner, position in zip(owners, positions, strict=True)
        ]
        slots = np.concatenate(slots).astype(np.int32)
        layers = Layers(KERNELS, replace(true, slot_mapping_np=slots))
        layers.layout = replace(
            layout,
            slot_mapping_np=slots,
            slot_mapping=mx.array(slots),
            lag=PositionLag(mx.array(lag), lag),
        )
        given = queries, weights, latent_queries = inputs_of(len(owners))
        results = layers.run(queries, weights, positions.astype(np.int32), latent_queries)
        assert len(results[0]) == 4
        check(layers, owners, positions, given, results)
