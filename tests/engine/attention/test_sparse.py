# SPDX-License-Identifier: Apache-2.0
"""Chosen positions, and attention to them, equal a naive search and softmax in float64."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

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
from vllm_metal.patches.mlx_patches.seam import (
    BlockChoice,
    Choice,
    GroupChoice,
    Scoring,
    num_positions,
)

BLOCK, NUM_BLOCKS, SIZE = 16, 24, 16
#: Tokens of each request in the step, and in its context: decodes, a prompt that begins with fewer
#: positions than a token attends to, drafts, a request that attends to all.
REQUESTS = [(1, 70), (20, 23), (4, 41), (3, 8), (1, 9)]
SINKS = np.array([0.7, -1.5, 1.2, 0.1, -0.4, 2.0, -2.2, 0.9], np.float32)  # of each head


#: Added to the gates of a group's rows, by their order.
ORDER = np.linspace(-1, 1, 5)[:, None] * np.linspace(2, -1, SIZE)


def pooled(rows):
    """Keys of groups of rows that are a key, and its gates in the softmax over the group."""
    keys, gates = mx.split(rows, [SIZE], axis=-1)
    shares = mx.softmax(gates + mx.array(ORDER[: rows.shape[2]], mx.float32), axis=2)
    return (shares * keys).sum(axis=2)


@dataclass(frozen=True)
class Case:
    """An indexer, and the layer for which it chooses."""

    choice: Choice
    index_heads: int
    heads: int
    kv_heads: int
    head_size: int = 20
    value_size: int = 16
    latent: bool = False
    weighted: bool = False  # whether the indexer's heads have weights

    @property
    def topk(self):
        return num_positions(self.choice)

    @property
    def index(self):
        row_size = 2 * SIZE if isinstance(self.choice, GroupChoice) else SIZE
        return IndexLayer.of("layers.0.1", self.index_heads, row_size, self.choice, SIZE)

    @property
    def layer(self):
        sizes = self.heads, self.kv_heads, self.head_size, None
        return AttentionLayer(
            *("layers.0.0", *sizes),
            value_size=self.value_size,
            latent=self.latent,
            topk=self.topk,
            choices=self.index_heads if isinstance(self.choice, BlockChoice) else 1,
        )


OF_LATENTS = {"index_heads": 3, "heads": 2, "kv_heads": 1, "latent": True, "weighted": True}
#: Blocks that the pool's are multiples of, and others; as many choices as K/V heads, more, fewer.
CASES = {
    "latents": Case(8, **OF_LATENTS),
    "groups of latents": Case(GroupChoice(2, 3, pooled), **OF_LATENTS),
    "groups for all K/V heads": Case(GroupChoice(5, 2, pooled), 3, 6, 2),
    "a choice for each K/V head": Case(BlockChoice(4, 2, 1), 2, 6, 2),
    "for half of its heads": Case(BlockChoice(3, 5, 2), 4, 8, 2, 16),
    "for two K/V heads": Case(BlockChoice(20, 1, 0), 2, 8, 4, 24, 24),
}


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
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    seen = np.take_along_axis(scores, order, -1) > -np.inf
    expected = np.sort(np.where(seen, order, 100))
    expected[expected == 100] = ABSENT
    found = sparse.largest(mx.array(scores), count)
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


def mirrored(slots, block_size=BLOCK):
    """Slots, or blocks of size 1, in the blocks of a group of the indexer's own; 0 is no block."""
    blocks = slots // block_size
    return np.where(blocks, (NUM_BLOCKS - blocks) * block_size + slots % block_size, slots)


def own_layout(layout):
    """The layout in the blocks of the indexer."""
    slots = mirrored(layout.slot_mapping_np).astype(np.int32)
    lagging = {} if layout.slot_mapping is None else {"slot_mapping": mx.array(slots)}
    tables = mirrored(layout.block_tables_np, 1).astype(np.int32)
    return replace(layout, block_tables_np=tables, slot_mapping_np=slots, **lagging)


class Layers:
    """An indexer's keys, and requests' K/V or latents in a pool with NaN elsewhere."""

    def __init__(self, case, backend, layout, sinks=None):
        self.case, self.layout, rng = case, layout, np.random.default_rng(0)
        self.sinks = sinks
        layers = case.index, case.layer
        shape = NUM_BLOCKS * BLOCK
        self.rows = []  # of each layer its keys, and its values: [slots, heads, size] float32
        for layer in layers:
            heads, *sizes, latent = layer.storage_key
            keys, values = (rng.normal(size=(shape, heads, n)).astype(np.float32) for n in sizes)
            self.rows.append((keys, keys[..., : sizes[1]] if latent else values))
        self.caches, self.scopes = [], []
        for index, layer in enumerate(layers):
            self.caches.append(layer.allocate(NUM_BLOCKS, BLOCK, mx.float32, backend))
            held = self.written_before(self.layouts[index])
            self.keep_only(index, np.broadcast_to(held, (layer.num_kv_heads, shape)))
            self.scopes.append(layer.scope(self.caches[-1]))

    @property
    def layouts(self):
        return own_layout(self.layout), self.layout

    def index_keys(self, slots):
        return self.rows[0][0][mirrored(slots), 0]

    def keep_only(self, index, held):
        """Sets all other rows of a layer's pool to NaN; `held`: [heads, slots] bool."""
        cache, arrays = self.caches[index], []
        cache.wait_for_device()
        for array, rows in zip(cache.arrays, self.rows[index], strict=False):
            rows = np.where(held[..., None], rows.swapaxes(0, 1), np.nan)
            arrays.append(mx.array(np.ascontiguousarray(rows.reshape(array.shape), np.float32)))
        cache.arrays = arrays
        mx.eval(cache.arrays)

    def written_before(self, layout):
        lens = np.diff(layout.query_start_loc_np)
        held = np.zeros(NUM_BLOCKS * BLOCK, bool)
        for table, length, count in zip(
            layout.block_tables_np, layout.seq_lens_np, lens, strict=True
        ):
            held[slots_of(table, np.arange(length - count))] = True
        return held

    def run(self, given, positions):
        """Returns positions chosen by each sparse token, and its output."""
        index, layer = self.caches
        both = list(zip(self.scopes, self.layouts, strict=True))
        plans = [scope.plan_of(layout) for scope, layout in both]
        for (_, layout), cache, plan, rows in zip(both, self.caches, plans, self.rows, strict=True):
            cache.write(plan, *(mx.array(part[layout.slot_mapping_np]) for part in rows))
        tokens = plans[0].sparse
        queries, weights, of_layer = map(mx.array, given)
        weights = weights if self.case.weighted else None
        scored = queries, weights, mx.array(positions.astype(np.int32))
        chosen = sparse.choose(index, plans[0], tokens, *scored, self.case.choice)
        read_slots = plans[1].sparse.read_slots_of(chosen)
        rows = plans[1].sparse.of_all(of_layer)
        scoring = Scoring(0.5, None if self.sinks is None else mx.array(self.sinks))
        out = sparse.attend(layer, plans[1], rows, read_slots, scoring, None)
        indices = mx.arange(len(self.layout.slot_mapping_np))
        return np.array(tokens.of_all(indices)), np.array(read_slots), np.array(out)


def chosen_of(case, query, rows, weights):
    """Positions that a token chooses by the rows of its context, of each choice."""
    if isinstance(case.choice, GroupChoice):
        return [chosen_of_groups(case.choice, query, rows, weights)]
    products = query @ rows.T
    if isinstance(case.choice, int):
        return [best(weights @ np.maximum(products, 0), case.choice)]
    size, topk, num_local = case.choice
    newest = (products.shape[1] - 1) // size
    found = []
    for row in products:
        scores = [row[first : first + size].max() for first in range(0, len(row), size)]
        scores = np.where(np.arange(newest + 1) > newest - num_local, np.inf, scores)
        found.append(np.flatnonzero(np.isin(np.arange(len(row)) // size, best(scores, topk))))
    return found


def best(scores, count):
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def chosen_of_groups(groups, query, rows, weights):
    keys = []
    for first in range(0, len(rows) - groups.size + 1, groups.size):
        of_group = rows[first : first + groups.size]
        shares = np.exp(of_group[:, SIZE:] + ORDER[: groups.size])
        keys.append((shares / shares.sum(0) * of_group[:, :SIZE]).sum(0))
    scores = weights @ np.maximum(query @ np.array(keys).T, 0)
    chosen = [*best(scores, groups.topk), len(keys)]
    return np.flatnonzero(np.isin(np.arange(len(rows)) // groups.size, chosen))


def expected_of(layers, table, position, query, weights, of_layer):
    """Returns a token's choices and output by a loop over its context and heads."""
    case, (keys, values) = layers.case, layers.rows[1]
    slots = slots_of(table, np.arange(position + 1))
    rows = layers.index_keys(slots).astype(np.float64)
    chosen = chosen_of(case, query, rows, weights if case.weighted else np.ones_like(weights))
    outputs = []
    for head, row in enumerate(of_layer):
        of_head = slots[chosen[head * len(chosen) // case.heads]]
        kv_head = head * case.kv_heads // case.heads
        scores = 0.5 * keys[of_head, kv_head].astype(np.float64) @ row
        shares = np.exp(scores)
        total = shares.sum()
        if layers.sinks is not None:
            total += np.exp(layers.sinks[head])
        outputs.append(shares / total @ values[of_head, kv_head])
    return chosen, np.array(outputs)


def check(layers, owners, positions, given, results):
    """Checks results; `owners`: each token's request; slots to read may be new rows."""
    tokens, read_slots, out = results
    written = layers.layout.slot_mapping_np
    for token, chosen_slots, found in zip(tokens.tolist(), read_slots, out, strict=True):
        table = layers.layout.block_tables_np[owners[token]]
        chosen, expected = expected_of(
            *(layers, table, positions[token]),
            *(part[token].astype(np.float64) for part in given),
        )
        new_rows = np.maximum(ABSENT - 1 - chosen_slots, 0)
        slots = np.where(chosen_slots < ABSENT, written[new_rows], chosen_slots)
        for of_choice, positions_of in zip(slots, chosen, strict=True):
            count = len(positions_of)
            assert np.array_equal(of_choice[:count], slots_of(table, positions_of))
            assert (of_choice[count:] == ABSENT).all()
        np.testing.assert_allclose(found, expected, atol=1e-5)


def inputs_of(case, num_tokens):
    rng = np.random.default_rng(3)
    sizes = (case.index_heads, SIZE), (case.index_heads,), (case.heads, case.head_size)
    return [rng.normal(size=(num_tokens, *size)).astype(np.float32) for size in sizes]


def held_by(case, read_slots):
    """Returns [heads, slots] bool: rows of each K/V head at its chosen slots."""
    held = np.zeros((case.kv_heads, NUM_BLOCKS * BLOCK), bool)
    num_choices = read_slots.shape[1]
    for head in range(case.heads):
        of_head = read_slots[:, head * num_choices // case.heads]
        held[head * case.kv_heads // case.heads, of_head[of_head >= 0]] = True
    return held


@pytest.mark.parametrize(("most_scores", "has_sinks"), [(sparse.MAX_SCORES, False), (600, True)])
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_prompts_drafts_and_decodes(name, backend, most_scores, has_sinks, monkeypatch):
    """Also by calls of few rows. Rows of the pool that nobody chose are NaN."""
    monkeypatch.setattr(sparse, "MAX_SCORES", most_scores)
    monkeypatch.setattr(sparse, "MAX_BYTES", 100 * most_scores)
    case, layout = CASES[name], layout_of(REQUESTS)
    sinks = SINKS[: case.heads] if has_sinks else None
    layers, lens = Layers(case, backend, layout, sinks), np.diff(layout.query_start_loc_np)
    owners = np.repeat(np.arange(len(lens)), lens)
    positions = np.arange(len(owners)) + np.repeat(
        layout.seq_lens_np - layout.query_start_loc_np[1:], lens
    )
    given = inputs_of(case, len(owners))
    results = layers.run(given, positions)
    assert np.array_equal(np.sort(results[0]), np.flatnonzero(positions >= case.topk))
    check(layers, owners, positions, given, results)
    layers.keep_only(1, held_by(case, results[1]))
    (_, read_slots, out) = layers.run(given, positions)
    assert np.array_equal(read_slots, results[1]) and np.array_equal(out, results[2])


@pytest.mark.parametrize("name", ["latents", "groups of latents", "a choice for each K/V head"])
def test_positions_that_only_the_device_knows(name):
    """The host counts three drafts that were rejected: one token then has fewer than it chooses."""
    case = CASES[name]
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
        layers = Layers(case, KERNELS, replace(true, slot_mapping_np=slots))
        layers.layout = replace(
            layout,
            slot_mapping_np=slots,
            slot_mapping=mx.array(slots),
            lag=PositionLag(mx.array(lag), lag),
        )
        given = inputs_of(case, len(owners))
        results = layers.run(given, positions)
        assert len(results[0]) == 4
        check(layers, owners, positions, given, results)
