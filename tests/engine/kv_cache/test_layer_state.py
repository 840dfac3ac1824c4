# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers beside attention, through the common layer interface."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.kv_cache.planned import planned
from engine.kv_cache.recurrent import HybridModel

from metal_kernels import kernel
from metal_kernels.kv_write import RotationKind
from vllm_metal.engine.attention.layers import AttentionLayer, RunLayer, attention_layers
from vllm_metal.engine.attention.paged_cache import LayerRotation
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.layer_state import Storage
from vllm_metal.engine.kv_cache.pages import BlockPages, page_rows
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import allocate_kv_caches, kv_cache_specs
from vllm_metal.engine.memory import profile
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.recurrent.recurrent_state import StateFormat
from vllm_metal.patches.mlx_patches import seam

BLOCK = 16
MEMORY = 1 << 22
MAX_NUM_REQS, MAX_BLOCKS, VOCAB = 6, 8, 64


@pytest.fixture(scope="module")
def model():
    seam.install()
    mx.random.seed(5)
    return HybridModel(VOCAB)


@pytest.fixture(params=[SCATTER, KERNELS])
def pool(request):
    """The class of the storages of K and V."""
    with kernel.using(metal_interpreter.metal_kernel):
        yield request.param


class Server:
    """The model over a pool that vLLM's own planner laid out."""

    def __init__(self, model, config, pool=SCATTER, memory=MEMORY):
        self.model = model
        self.layers = attention_layers(model, "hybrid")
        self.specs = kv_cache_specs(self.layers, BLOCK, mx.float32)
        self.placed = planned(config, self.specs, memory)
        self.states = allocate_kv_caches(self.placed, self.layers, BLOCK, mx.float32, pool)
        groups = self.placed.kv_cache_groups
        group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
        self.paged = PagedLayers(self.layers, self.states, group_of, BLOCK)
        self.tables = BlockTables(len(groups), MAX_NUM_REQS, MAX_BLOCKS)
        rng = np.random.default_rng(1)
        self.free = rng.permutation(np.arange(1, self.placed.num_blocks)).tolist()
        self.blocks = {}

    def begin(self, req_idx):
        """Gives the request blocks of every group; a block belongs to one group."""
        groups = self.placed.kv_cache_groups
        self.blocks[req_idx] = [[self.free.pop() for _ in range(MAX_BLOCKS)] for _ in groups]
        self.tables.replace(req_idx, self.blocks[req_idx])

    def all_blocks(self, req_idx):
        return np.concatenate(self.blocks[req_idx]).astype(np.int32)

    def step(self, chunks, drafts=None):
        """Returns [n, V] logits of each request's rows, for (req_idx, position, tokens).

        `drafts` says how many of each one's last tokens are drafts.
        """
        counts = np.array([len(tokens) for _, _, tokens in chunks], np.int32)
        starts = np.array([start for _, start, _ in chunks], np.int32)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate([start + np.arange(len(t)) for _, start, t in chunks])
        rows = Rows(
            req_indices_np=np.array([req_idx for req_idx, _, _ in chunks], np.int32),
            query_start_loc_np=bounds,
            seq_lens_np=starts + counts,
            positions_np=positions.astype(np.int32),
            positions=mx.array(positions.astype(np.int32)),
            input_ids=mx.array(np.concatenate([tokens for _, _, tokens in chunks])),
            logits_indices=None,
            num_drafts_np=None if drafts is None else np.array(drafts, np.int32),
        )
        self.rows = rows
        with self.paged.step(rows, self.tables) as caches:
            logits = self.model(rows.input_ids[:, None], cache=caches)[:, 0]
        mx.async_eval(logits)
        return np.split(np.array(logits), bounds[1:-1])


def text(length, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def dense(model, tokens):
    return np.array(model(mx.array(tokens)[None]))[0]


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)


def test_layers_of_each_kind_are_read_off_the_model(model):
    form, rotation = StateFormat(((32,),), (mx.float32,)), LayerRotation(RotationKind(64), True)
    assert attention_layers(model, "hybrid") == [
        AttentionLayer("layers.0", 4, 2, 64, None, rotation=rotation),
        RunLayer("layers.1", form),
        AttentionLayer("layers.2", 4, 2, 64, 24, rotation=rotation),
        RunLayer("layers.3", form),
    ]


def test_storages_of_each_kind_fit_the_memory_that_vllm_gave_them(model, config, pool):
    server = Server(model, config, pool)
    assert len(server.placed.kv_cache_groups) > 1
    assert len({spec.page_size_bytes for spec in server.specs.values()}) == 1
    assert server.paged.pipelined == pool.pipelined
    used = sum(state.nbytes for state in server.paged.pool_arrays())
    assert 0.5 * MEMORY < used <= MEMORY
    for group in server.placed.kv_cache_groups:  # layers of one group share nothing
        assert len({id(server.states[name]) for name in group.layer_names}) == len(
            group.layer_names
        )


def test_chunks_of_mixed_batches_equal_the_dense_recurrence(model, config, pool):
    server = Server(model, config, pool)
    texts = [text(length, seed) for seed, length in enumerate((50, 33, 1, 70))]
    for req_idx in range(4):
        server.begin(req_idx)
    found, done = [[] for _ in texts], [0] * len(texts)
    while any(at < len(tokens) for at, tokens in zip(done, texts, strict=True)):
        chunks = [
            (req_idx, done[req_idx], tokens[done[req_idx] :][: (7, 20, 1, 16)[req_idx]])
            for req_idx, tokens in enumerate(texts)
            if done[req_idx] < len(tokens)
        ]
        for (req_idx, _, tokens), logits in zip(chunks, server.step(chunks), strict=True):
            found[req_idx].append(logits)
            done[req_idx] += len(tokens)
    for logits, tokens in zip(found, texts, strict=True):
        close(np.concatenate(logits), dense(model, tokens))


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_a_state_goes_back_to_the_last_accepted_token(model, config, pool, accepted):
    """One request verifies three drafts, another has none."""
    server = Server(model, config, pool)
    truth, other = text(30, 0), text(25, 1)
    server.begin(0), server.begin(1)
    server.step([(0, 0, truth[:20]), (1, 0, other[:20])])
    drafts = truth[21:24].copy()
    drafts[accepted:] = (drafts[accepted:] + 1) % VOCAB
    rows = np.concatenate([truth[20:21], drafts])
    server.step([(0, 20, rows), (1, 20, other[20:21])], drafts=(3, 0))
    server.paged.record_accepted(server.rows, np.array([accepted, 4], np.int32))
    ends = 21 + accepted
    found = server.step([(0, ends, truth[ends:]), (1, 21, other[21:])])
    close(found[0], dense(model, truth)[ends:])
    close(found[1], dense(model, other)[21:])


def test_a_request_goes_on_from_copied_blocks(model, config, pool):
    server = Server(model, config, pool)
    tokens = text(40, 2)
    server.begin(0), server.begin(1)
    server.step([(0, 0, tokens[:30])])
    pairs = list(zip(server.all_blocks(0), server.all_blocks(1), strict=True))
    server.paged.update_blocks([], pairs)
    close(server.step([(1, 30, tokens[30:])])[0], dense(model, tokens)[30:])
    close(server.step([(0, 30, tokens[30:])])[0], dense(model, tokens)[30:])


def test_cleared_blocks_hold_nothing(model, config, pool):
    server = Server(model, config, pool)
    server.begin(0)
    server.step([(0, 0, text(30, 2))])
    server.paged.update_blocks(server.all_blocks(0).tolist(), [])
    assert not any(array.any().item() for array in server.paged.pool_arrays())


def test_a_request_goes_on_in_another_engine_from_pages(model, config, pool):
    """The copy waits behind another request's step; state and K/V are pages of their groups."""
    first, second = Server(model, config, pool), Server(model, config, pool)
    groups = [group.layer_names for group in first.placed.kv_cache_groups]
    ours, theirs = BlockPages(first.states, groups), BlockPages(second.states, groups)
    tokens = text(40, 3)
    first.begin(0), first.begin(1), second.begin(5), second.begin(2)
    first.step([(0, 0, tokens[:30])])
    first.step([(1, 0, text(9, 1))])
    sources = [np.array(blocks, np.int32) for blocks in first.blocks[0]]
    queued = [ours.queue_export(group, blocks) for group, blocks in enumerate(sources)]
    mx.async_eval(queued)
    first.paged.update_blocks(first.all_blocks(0).tolist(), [])
    for group, (blocks, arrays) in enumerate(zip(second.blocks[2], queued, strict=True)):
        theirs.import_pages(group, np.array(blocks, np.int32), page_rows(arrays))
    close(second.step([(2, 30, tokens[30:])])[0], dense(model, tokens)[30:])


def test_the_largest_step_runs_layers_of_every_kind(model, config):
    layers = attention_layers(model, "hybrid")
    largest = profile.LargestStep.of(layers, config, SCATTER)
    with largest.caches() as caches:
        logits = model(largest.rows.input_ids[:, None], cache=caches)
    assert len(logits) == len(largest.rows.positions_np) == profile.largest_step(config)[0]
    mx.eval(logits)
    profile.profile_layers(layers, config, SCATTER, 100)


def test_no_layer_has_a_step_once_its_forward_is_built(model, config):
    server = Server(model, config)
    server.begin(0)
    kept = []

    def keeping(inputs, cache):
        kept.extend(cache)
        return model(inputs, cache=cache)

    def failing(inputs, cache):
        raise ValueError("the forward fails")

    server.model = keeping
    server.step([(0, 0, text(3, 0))])
    with pytest.raises(RuntimeError, match="outside a step"):
        kept[0].offset  # noqa: B018
    server.model = failing
    with pytest.raises(ValueError, match="the forward fails"):
        server.step([(0, 3, text(1, 0))])
    for cache in kept[::2]:
        with pytest.raises(RuntimeError, match="outside a step"):
            cache.update_and_fetch(mx.zeros((1, 2, 1, 64)), mx.zeros((1, 2, 1, 64)))
    for layer, cache in zip(model.layers[1::2], kept[1::2], strict=True):
        with pytest.raises(RuntimeError, match="outside a step"):
            layer(mx.zeros((1, 1, 32)), None, cache)


class Counters(Storage):
    """A state that implements only what every kind must: one number per block."""

    pipelined = False

    def __init__(self, num_blocks):
        self._arrays = [mx.arange(1, num_blocks + 1, dtype=mx.int32)]

    @property
    def arrays(self):
        return self._arrays

    @arrays.setter
    def arrays(self, arrays):
        self._arrays = list(arrays)

    def wait_for_device(self):
        mx.eval(self._arrays)


def test_a_state_without_the_optional_parts_travels_in_whole_blocks():
    state = Counters(6)
    state.copy_blocks(np.array([1, 2]), np.array([4, 5]))
    state.clear_blocks(np.array([0]))
    pages = BlockPages({"layer": state}, [["layer"]])
    rows = page_rows(pages.export(0, np.array([4, 0])))
    assert rows.view(np.int32).ravel().tolist() == [2, 0]
    assert page_rows(pages.queue_export(0, np.array([5]))).view(np.int32).tolist() == [[3]]
    pages.import_pages(0, np.array([3, 1]), rows)
    assert state.arrays[0].tolist() == [0, 0, 3, 2, 2, 3]
