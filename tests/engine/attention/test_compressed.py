# SPDX-License-Identifier: Apache-2.0
"""A window and compressed entries in one softmax equal a naive loop over tokens in float64."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.attention.test_sparse import BLOCK, NUM_BLOCKS, layout_of, slots_of

from metal_kernels import kernel
from metal_kernels.layout import PositionLag
from vllm_metal.engine.attention import compressed, sparse
from vllm_metal.engine.attention.compressed_layer import RowLayer
from vllm_metal.engine.kv_cache import compressed_rows
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.patches.mlx_patches.seam import Compression, EntryBlocks, Scoring

#: Tokens of each request in the step, and in its context: decodes, one of which ends a group, a
#: prompt that begins, drafts, and a short text.
REQUESTS = [(1, 70), (1, 64), (20, 23), (4, 41), (1, 3)]
HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH, UNIT, SCALE = 3, 40, 2, 12, 16, 0.5
SINKS = np.array([0.7, -1.5, 1.2], np.float32)
#: All entries of groups as large as several blocks hold, and of smaller ones; the entries of an
#: indexer, of which the first requests have more than a token attends to; and those of one position
#: each, chosen by a second indexer from the blocks that a first one chooses.
CASES = {
    "window": Compression(window=7, kept=40, unit=UNIT),
    "all": Compression(7, 40, UNIT, size=8),
    "large groups": Compression(7, 40, UNIT, size=20),
    "chosen": Compression(7, 40, UNIT, size=4, overlap=True, topk=5),
    "among blocks": Compression(
        *(7, 40, WIDTH), size=1, topk=5, blocks=EntryBlocks(size=3, topk=3), smallest=1
    ),
}


@pytest.fixture(params=["scatter", "kernels"])
def backend(request):
    ours = request.param == "kernels"
    with kernel.using(metal_interpreter.metal_kernel) if ours else nullcontext():
        yield KERNELS if ours else SCATTER


class Layers:
    """Rows of all positions of the requests, and pools that hold those of earlier steps."""

    def __init__(self, by, backend, layout, positions):
        self.by, self.layout, self.positions = by, layout, positions
        rng = np.random.default_rng(0)
        self.num_tokens = np.diff(layout.query_start_loc_np)
        draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
        longest = int(layout.seq_lens_np.max())
        self.rows = [draw(longest, WIDTH) for _ in self.num_tokens]  # keys of each request
        self.parts = [draw(longest, 2 * WIDTH) for _ in self.num_tokens]
        self.entries = [draw(longest, WIDTH) for _ in self.num_tokens]
        self.index = [draw(longest, INDEX_WIDTH) for _ in self.num_tokens]
        self.layers = {"keys": RowLayer.of("layers.0.0", "keys", by, WIDTH, HEADS)}
        if by.size:
            self.layers["groups"] = RowLayer.of("layers.0.1", "groups", by, 2 * WIDTH)
            self.layers["entries"] = RowLayer.of("layers.0.2", "entries", by, WIDTH)
        if by.topk is not None:
            self.layers["index"] = RowLayer.of("layers.0.3", "index", by, INDEX_WIDTH, INDEX_HEADS)
        self.caches = {}
        for name, layer in self.layers.items():
            state = layer.allocate(NUM_BLOCKS, BLOCK, mx.float32, backend)
            scope = layer.scope(state)
            self.caches[name] = state, layer.cache(state, scope), scope
            self.fill(name, self.known(name))

    def known(self, name):
        """[slots] bool and [slots, units, unit] of what earlier steps have written."""
        state, by = self.caches[name][0], self.by
        heads = len(state.keys.elements)
        held = np.zeros(NUM_BLOCKS * BLOCK, bool)
        found = np.full((len(held), heads, by.unit), np.nan, np.float32)
        for index, (table, length) in enumerate(
            zip(self.layout.block_tables_np, self.layout.seq_lens_np, strict=True)
        ):
            before = int(length - self.num_tokens[index])
            if name in ("keys", "groups"):
                source = {"keys": self.rows, "groups": self.parts}[name][index][:before]
                written = slots_of(table, np.arange(before))
                found[written] = padded(source, heads, by.unit)
            else:
                source = {"entries": self.entries, "index": self.index}[name][index]
                slots = by.slots_of(source.shape[1])
                ends = before // by.size
                positions = np.arange(1, ends + 1)[:, None] * by.size + np.arange(-slots, 0)
                written = slots_of(table, positions.ravel())
                found[written] = padded(source[:ends], slots, by.unit).reshape(-1, 1, by.unit)
            held[written] = True
        return held, found

    def fill(self, name, known):
        state, (_, found) = self.caches[name][0], known
        state.wait_for_device()
        shape = state.keys.elements.shape
        rows = np.ascontiguousarray(found.swapaxes(0, 1)).reshape(shape)
        state.arrays = [mx.array(rows)]
        mx.eval(state.arrays)

    def run(self, given):
        """Outputs of all tokens, and the rows of groups with their first positions."""
        queries, index_queries, weights = map(mx.array, given)
        owners = np.repeat(np.arange(len(self.num_tokens)), self.num_tokens)
        keys, parts = (
            mx.array(np.stack([of[o][p] for o, p in zip(owners, self.positions, strict=True)]))
            for of in (self.rows, self.parts)
        )
        positions = mx.array(self.positions.astype(np.int32))
        caches = {name: cache for name, (_, cache, _) in self.caches.items()}
        by, groups = self.by, None
        with ExitStack() as stack:
            for _, _, scope in self.caches.values():
                stack.enter_context(scope.during(positions, scope.plan_of(self.layout)))
            chosen = None
            if by.size:
                groups = caches["groups"].write_groups(parts[:, None, None], by)
                firsts = np.array(groups[1])
                counts = -(-self.num_tokens // by.size)
                of = list(zip(np.repeat(np.arange(len(counts)), counts), firsts, strict=True))
                entries = np.stack([self.entries[o][first // by.size] for o, first in of])
                caches["entries"].write_entries(mx.array(entries), by)
                if by.topk is not None:
                    index = np.stack([self.index[o][first // by.size] for o, first in of])
                    asked = index_queries[:, :, None], weights[:, None]
                    chosen = caches["index"].choose_entries(mx.array(index), *asked, by)
                if by.blocks is not None:
                    others = -asked[0], asked[1]
                    chosen = caches["index"].choose_entries(None, *others, by, chosen)
            out = caches["keys"].attend_to_entries(
                queries[:, :, None],
                keys[:, None, None],
                by,
                Scoring(SCALE, mx.array(SINKS)),
                caches.get("entries"),
                chosen,
            )
            mx.eval(out, groups or [])
        return np.array(out)[:, :, 0], owners, groups

    def expected(self, owner, position, query, index_query, weights):
        """Keys of the window, then entries, of a token, and its output."""
        by = self.by
        values = [self.rows[owner][max(position - by.window + 1, 0) : position + 1]]
        numbers = np.arange((position + 1) // by.size if by.size else 0)
        if by.topk is not None and len(numbers) > by.topk:
            keys = self.index[owner][numbers].astype(np.float64)
            scores = weights @ np.maximum(index_query @ keys.T, 0)
            if by.blocks is not None:
                best = np.full(-(-len(numbers) // by.blocks.size), -np.inf)
                np.maximum.at(best, numbers // by.blocks.size, scores)
                best[-1] = np.inf  # the newest
                kept = np.argsort(-best, kind="stable")[: by.blocks.topk]
                scores = weights @ np.maximum(-index_query @ keys.T, 0)
                scores[~np.isin(numbers // by.blocks.size, kept)] = -np.inf
            numbers = np.sort(np.argsort(-scores, kind="stable")[: by.topk])
        values.append(self.entries[owner][numbers])
        rows = np.concatenate(values).astype(np.float64)
        shares = np.exp(SCALE * query @ rows.T)
        return numbers, shares / (shares.sum(1) + np.exp(SINKS))[:, None] @ rows


def padded(rows, units, unit):
    missing = units * unit - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing))).reshape(len(rows), units, unit)


def inputs_of(count):
    rng = np.random.default_rng(3)
    sizes = (HEADS, WIDTH), (INDEX_HEADS, INDEX_WIDTH), (INDEX_HEADS,)
    return [rng.normal(size=(count, *size)).astype(np.float32) for size in sizes]


def check(layers, given, results):
    out, owners, groups = results
    chosen = []
    for token, (owner, position) in enumerate(zip(owners, layers.positions, strict=True)):
        numbers, wanted = layers.expected(owner, position, *(part[token] for part in given))
        np.testing.assert_allclose(out[token], wanted, atol=1e-5)
        chosen.append((owner, numbers))
    if groups is None:
        return chosen
    rows, firsts = map(np.array, groups)
    by = layers.by
    counts = -(-layers.num_tokens // by.size)
    first_of = {}
    for owner, first, found in zip(
        np.repeat(np.arange(len(counts)), counts), firsts, rows, strict=True
    ):
        start = layers.positions[owners == owner][0]
        expected_first = first_of.setdefault(owner, start // by.size * by.size)
        assert first == expected_first
        first_of[owner] += by.size
        end = layers.positions[owners == owner][-1] + 1
        positions = np.arange(first - (by.size if by.overlap else 0), first + by.size)
        seen = (positions >= 0) & (positions < end)
        wanted = np.where(seen[:, None], layers.parts[owner][np.where(seen, positions, 0)], 0)
        assert np.array_equal(found, wanted)
    return chosen


def made(name, backend, layout):
    lens = np.diff(layout.query_start_loc_np)
    before = layout.seq_lens_np - layout.query_start_loc_np[1:]
    positions = np.arange(lens.sum()) + np.repeat(before, lens)
    return Layers(CASES[name], backend, layout, positions), inputs_of(lens.sum())


@pytest.mark.parametrize(
    ("most_bytes", "most_tokens"), [(sparse.MAX_BYTES, compressed_rows.MAX_TOKENS), (2000, 6)]
)
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_prompts_drafts_and_decodes(name, backend, most_bytes, most_tokens, monkeypatch):
    """Also by calls of few rows. Then with NaN in all rows of the pool that nobody attends to."""
    monkeypatch.setattr(sparse, "MAX_BYTES", most_bytes)
    monkeypatch.setattr(compressed_rows, "MAX_TOKENS", most_tokens)
    layers, given = made(name, backend, layout_of(REQUESTS))
    results = layers.run(given)
    chosen = check(layers, given, results)
    if not layers.by.size:
        return
    held, rows = layers.known("entries")
    keep = np.zeros_like(held)
    for owner, numbers in chosen:
        slots = layers.by.slots_of(WIDTH)
        positions = (numbers[:, None] + 1) * layers.by.size + np.arange(-slots, 0)
        keep[slots_of(layers.layout.block_tables_np[owner], positions.ravel())] = True
    assert keep[held].all() == (layers.by.topk is None)
    for other in layers.caches:
        layers.fill(other, layers.known(other))
    layers.fill("entries", (held, np.where(keep[:, None, None], rows, np.nan)))
    assert np.array_equal(layers.run(given)[0], results[0])


@pytest.mark.parametrize("name", ["large groups", "chosen", "among blocks"])
def test_positions_that_only_the_device_knows(name):
    """The host counts three drafts that were rejected, and the end of a group with them."""
    with kernel.using(metal_interpreter.metal_kernel):
        layout = layout_of([(1, 42), (3, 22), (2, 30)])
        lag = np.array([3, 3, 0], np.int32)
        true = replace(layout, seq_lens_np=layout.seq_lens_np - lag)
        positions = np.array([38, 16, 17, 18, 28, 29])
        owners = np.array([0, 1, 1, 1, 2, 2])
        slots = np.concatenate(
            [
                slots_of(layout.block_tables_np[o], np.array([p]))
                for o, p in zip(owners, positions, strict=True)
            ]
        ).astype(np.int32)
        layers = Layers(CASES[name], KERNELS, replace(true, slot_mapping_np=slots), positions)
        layers.layout = replace(
            layout,
            slot_mapping_np=slots,
            slot_mapping=mx.array(slots),
            lag=PositionLag(mx.array(lag), lag),
        )
        given = inputs_of(len(positions))
        check(layers, given, layers.run(given))


def test_rows_of_the_pool_are_read_once(monkeypatch):
    """Index rows of each context, chosen rows of each token, and each piece's window."""
    layers, given = made("chosen", SCATTER, layout_of([(1, 90), (1, 90)]))
    read, rows_at = [], compressed.Stored.rows_at
    by = layers.by

    def counting(stored, read_slots, *rest):
        heads = len(stored.kv_cache.keys.elements)
        read.append((stored.width, int((read_slots != -1).sum()) * heads))
        return rows_at(stored, read_slots, *rest)

    monkeypatch.setattr(compressed.Stored, "rows_at", counting)
    layers.run(given)
    counted = {
        width: sum(count for of, count in read if of == width) for width in {of for of, _ in read}
    }
    units, entries, index = by.units_of(WIDTH), by.slots_of(WIDTH), by.slots_of(INDEX_WIDTH)
    assert counted[INDEX_WIDTH] == 2 * (90 // by.size) * index
    assert counted[WIDTH] == 2 * (by.window * units + by.topk * entries)
    assert counted[2 * WIDTH] <= 2 * 2 * by.size * by.units_of(2 * WIDTH)


def test_an_entry_needs_room_in_its_group():
    with pytest.raises(NotImplementedError, match="do not fit into 16 elements per position"):
        RowLayer.of("layers.0.2", "entries", CASES["chosen"], 65)
