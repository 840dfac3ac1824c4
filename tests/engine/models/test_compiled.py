# SPDX-License-Identifier: Apache-2.0
"""Compiled steps equal those built by the model's Python."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from engine.models import recurrent
from engine.models.cases import cases
from engine.models.test_executor import BLOCK, COMMON, FAMILIES, build, executor, new_request
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels import kernel
from tests.metal_kernels.doubles import Digesting
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.batch.input_batch import prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.gathered import ByMLX
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.models.parts import HiddenStates, ModelParts

NUM_STEPS = 12  # over the end of a block


class Texts:
    """Requests with known tokens, computed in steps."""

    def __init__(self, run, texts, num_blocks=8):
        """
        Args:
            run: the executor.
            texts: token ids per text.
            num_blocks: number of blocks per text.
        """
        self._run, self._done = run, 0
        self._tables = BlockTables(1, len(texts), 9)
        self._requests = Requests(len(texts), 128, self._tables)
        for index, text in enumerate(texts):
            blocks = list(range(1 + index * num_blocks, 1 + (index + 1) * num_blocks))
            self._requests.add_request(new_request(str(index), text, blocks))

    def step(self, num_tokens):
        """Returns [R, V] logits of the last of each request's next tokens."""
        states = list(self._requests)
        for state in states:
            self._requests.num_computed_tokens_np[state.req_idx] = self._done
        counts = {state.req_id: num_tokens for state in states}
        batch = prepare(self._requests, counts, mx.zeros(len(states), mx.int32))
        hidden = self._run.forward_hidden(batch, self._tables)
        self._done += num_tokens
        return np.array(self._run.compute_logits(hidden[num_tokens - 1 :: num_tokens]))


def calls(model, monkeypatch):
    """Returns a growing list of the runs of the model's Python."""
    made, family = [], type(model)
    call = family.__call__

    def counting(self, *args, **kwargs):
        made.append(len(args))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(family, "__call__", counting)
    return made


@pytest.mark.parametrize(
    "model_type", cases(sorted(FAMILIES), ["llama", "gpt_oss"], ["gemma3_text", "mixtral"])
)
def test_steps_that_come_again_equal_the_dense_forward(model_type, monkeypatch):
    model = build(model_type)
    tokens = np.random.default_rng(4).integers(0, 128, (3, 8 + NUM_STEPS)).tolist()
    dense = np.stack(
        [model(mx.array([text]), cache=make_prompt_cache(model))[0] for text in tokens]
    )
    texts = Texts(executor(model, model_type, 40), tokens)
    texts.step(8)
    made = calls(model, monkeypatch)
    for number in range(8, 8 + NUM_STEPS):
        np.testing.assert_allclose(texts.step(1), dense[:, number], atol=2e-4, rtol=2e-4)
    # Two widths of the context, each built in Python twice; and logits, by a call a step.
    assert len(made) - NUM_STEPS <= 4


@pytest.mark.parametrize("layer_ids", [pytest.param(None, marks=pytest.mark.more), [1, 3]])
def test_hidden_states_are_shown_as_well(layer_ids):
    tokens = np.random.default_rng(5).integers(0, 128, (2, 16)).tolist()
    run = executor(build("llama"), "llama", 40)
    observer = HiddenStates(run.parts, layer_ids)
    whole = Texts(run, tokens)
    whole.step(16)
    expected = np.array(observer.take()).reshape(2, 16, -1)
    texts = Texts(run, tokens)
    texts.step(4)
    observer.take()
    for number in range(4, 16):
        texts.step(1)
        np.testing.assert_allclose(observer.take(), expected[:, number], atol=2e-4, rtol=2e-4)


def test_a_model_that_looks_at_values_is_built_by_its_python(monkeypatch):
    model = build("llama")
    tokens = np.random.default_rng(6).integers(0, 128, (2, 14)).tolist()
    dense = np.array(model(mx.array(tokens), cache=make_prompt_cache(model)))
    norm = type(model.model.norm)
    call = norm.__call__

    def looking(self, hidden):
        assert not mx.isnan(hidden).any().item()
        return call(self, hidden)

    monkeypatch.setattr(norm, "__call__", looking)
    texts = Texts(executor(model, "llama", 40), tokens)
    texts.step(8)
    made = calls(model, monkeypatch)
    for number in range(8, 14):
        np.testing.assert_allclose(texts.step(1), dense[:, number], atol=2e-4, rtol=2e-4)
    assert len(made) == 2 * 6 + 1  # of each step its forward and its logits, and one trace


@pytest.mark.parametrize("elements", [mx.uint8, pytest.param(mx.int8, marks=pytest.mark.more)])
def test_codes_are_those_of_steps_built_in_python(elements, monkeypatch):
    tokens = np.random.default_rng(7).integers(0, 128, (2, 40)).tolist()
    found = []
    for rows in (512, 0):  # the most that a graph is made for: none at last
        monkeypatch.setattr("vllm_metal.engine.models.compiled.MAX_ROWS", rows)
        texts = Texts(executor(build("llama"), "llama", 40, elements), tokens)
        texts.step(10)
        found.append(np.stack([texts.step(3) for _ in range(10)]))
    np.testing.assert_allclose(*found, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("elements", "rows"),
    [
        pytest.param(mx.float32, ByMLX(), marks=pytest.mark.more),
        pytest.param(mx.uint8, ByMLX(), marks=pytest.mark.slow),
        (mx.uint8, ByMLX(True, {1: 64})),  # MLX attends to what a kernel gathers
    ],
)
def test_steps_over_kernels_are_those_built_in_python(elements, rows, monkeypatch):
    """The stand-in kernels' results depend on all inputs, past fences included."""
    monkeypatch.setitem(COMMON, "head_dim", 64)
    monkeypatch.setitem(COMMON, "num_hidden_layers", 2)
    monkeypatch.setattr(mx.fast, "metal_kernel", Digesting().metal_kernel)
    model = build("llama")
    tokens = np.random.default_rng(8).integers(0, 128, (2, 40)).tolist()
    by_mlx = dict.fromkeys((layer.kind for layer in attention_layers(model, "llama")), rows)
    found, made = [], calls(model, monkeypatch)
    with kernel.using(mx.fast.metal_kernel):
        for repeatable in (True, False):
            backend = KernelBackend(repeatable=repeatable, by_mlx=by_mlx)
            # The first block is nobody's.
            texts = Texts(executor(model, "llama", 7, elements, backend), tokens, 3)
            made.clear()
            found.append(np.stack([texts.step(1) for _ in range(36)] + [texts.step(2)]))
            found_calls = len(made) - len(found[-1])  # logits take one a step
            # Gathered contexts of one, two and three blocks are graphs of their own.
            assert found_calls <= (8 if rows else 4) if repeatable else found_calls == 37
    np.testing.assert_allclose(*found, atol=2e-4, rtol=2e-4)


def test_steps_with_states_over_kernels_are_those_built_in_python(monkeypatch):
    """States share the memory of K and V, or have their own."""
    monkeypatch.setattr(mx.fast, "metal_kernel", Digesting().metal_kernel)
    family = replace(
        recurrent.FAMILIES["qwen3_next"],
        config=recurrent.FAMILIES["qwen3_next"].config | {"head_dim": 64},
    )
    model = recurrent.make_model(family)
    tokens = np.random.default_rng(8).integers(0, 64, (2, 40)).tolist()
    found, made = [], calls(model, monkeypatch)
    with kernel.using(mx.fast.metal_kernel):
        for backend in (KERNELS, KernelBackend(repeatable=False)):
            texts = Texts(sharing_executor(model, 7, backend), tokens, 3)
            made.clear()
            found.append(np.stack([texts.step(1) for _ in range(36)] + [texts.step(2)]))
            found_calls = len(made) - len(found[-1])  # logits take one a step
            assert found_calls <= 6 if backend == KERNELS else found_calls == 37
    np.testing.assert_allclose(*found, atol=2e-4, rtol=2e-4)


def sharing_executor(model, num_blocks, backend):
    """The first two of its recurrent layers in the memory of the layer that attends.

    All go by one block table: what they store overlaps, in a pool that stores nothing.
    """
    layers = attention_layers(model, "qwen3_next")
    (host,) = (layer for layer in layers if not layer.state_bytes)
    memory = host.allocate(num_blocks, BLOCK, mx.float32, backend)
    states = {host.name: memory}
    for layer in layers[:2]:
        states[layer.name] = layer.share(memory)
    states[layers[2].name] = layers[2].allocate(num_blocks, BLOCK, mx.float32, backend)
    group_of = {layer.name: 0 for layer in layers}
    return ModelExecutor(ModelParts(model), layers, states, group_of, BLOCK)


class RandomBatches:
    """Steps of a few requests: most decode, some verify drafts or start."""

    NUM_REQUESTS, LENGTH = 6, 120

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)
        self.tokens = self._rng.integers(0, 128, (self.NUM_REQUESTS, self.LENGTH))
        self._computed = np.zeros(self.NUM_REQUESTS, np.int32)
        self.tables = BlockTables(1, self.NUM_REQUESTS, 8)
        blocks = 1 + np.arange(8 * self.NUM_REQUESTS, dtype=np.int32)
        self.tables.tables_np[0][:] = blocks.reshape(self.NUM_REQUESTS, -1)

    def next_rows(self):
        rng = self._rng
        size = rng.integers(1, self.NUM_REQUESTS + 1)
        requests = rng.choice(self.NUM_REQUESTS, size, replace=False).astype(np.int32)
        done = (self._computed[requests] > self.LENGTH - 5) | (rng.random(size) < 0.01)
        self._computed[requests[done]] = 0
        before = self._computed[requests]
        more = rng.choice([1, 3], p=[0.9, 0.1])  # a row each, or two drafts besides
        counts = np.where(before == 0, rng.integers(1, 30, size), more).astype(np.int32)
        self._computed[requests] += counts
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        owner = np.repeat(np.arange(size), counts)
        positions = (np.arange(starts[-1]) - starts[owner] + before[owner]).astype(np.int32)
        tokens = self.tokens[requests[owner], positions].astype(np.int32)
        return Rows(
            req_indices_np=requests,
            query_start_loc_np=starts,
            seq_lens_np=before + counts,
            positions_np=positions,
            positions=mx.array(positions),
            input_ids=mx.array(tokens),
            logits_indices=None,
        )


@pytest.mark.parametrize("num_steps", [160, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_batches_compile_few_graphs_and_any_step_may_do_without(num_steps, monkeypatch):
    monkeypatch.setitem(COMMON, "num_hidden_layers", 2)
    model, batches = build("llama"), RandomBatches(8)
    dense = np.array(model(mx.array(batches.tokens), cache=make_prompt_cache(model)))
    run = executor(model, "llama", 50)
    made, compile_graph = [], mx.compile

    def counting(function, **options):
        made.append(function)
        return compile_graph(function, **options)

    monkeypatch.setattr(mx, "compile", counting)
    rng = np.random.default_rng(9)
    for number in range(num_steps):
        rows = batches.next_rows()
        use_graphs = number < num_steps // 2 or rng.random() < 0.5  # and switched in mid-run
        monkeypatch.setattr("vllm_metal.engine.models.compiled.MAX_ROWS", 512 if use_graphs else 0)
        found = np.array(run.forward(rows, batches.tables))
        requests = np.repeat(rows.req_indices_np, np.diff(rows.query_start_loc_np))
        expected = dense[requests, rows.positions_np]
        np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)
    # Decode steps: one for each number of requests and width of the context; as many that verify.
    assert 8 <= len(made) <= 2 * RandomBatches.NUM_REQUESTS * 8
