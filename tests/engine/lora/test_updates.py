# SPDX-License-Identifier: Apache-2.0
"""Each row gets the update of its own slot, in linear layers and in experts, sorted or not."""

import gc

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm.models.switch_layers import SwitchGLU

from vllm_metal.cli.fit.graph import record
from vllm_metal.engine.attention.forward_inputs import ForwardInputs, bound
from vllm_metal.engine.lora.adapter import LowRank
from vllm_metal.engine.lora.updates import Updates

DIM, INNER, EXPERTS, SLOTS_USED = 16, 12, 4, 3
BLOCK = "model.layers.0"


class Block(nn.Module):
    """A linear layer, experts, and an unused layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.experts = SwitchGLU(DIM, INNER, EXPERTS)
        self.unused = nn.Linear(DIM, DIM)

    def __call__(self, x):
        x = self.first(x)
        chosen = mx.argsort(x[..., :EXPERTS], axis=-1)[..., :2]
        return self.experts(x, chosen).sum(-2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, DIM)
        self.layers = [Block()]

    def __call__(self, ids):
        return self.layers[0](self.embed_tokens(ids))


class Model(nn.Module):
    """A block, and a head that is called with some of a step's rows."""

    def __init__(self):
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(DIM, 8)

    @property
    def layers(self):
        return self.model.layers

    def hidden(self, x):
        return self.layers[0](x)

    def __call__(self, ids):
        return self.lm_head(self.model(ids))


def low_rank(sizes, seed, rank):
    experts = () if sizes.num_experts is None else (sizes.num_experts,)
    a, b = (mx.random.key(seed), mx.random.key(seed + 1000))
    return LowRank(
        mx.random.normal((*experts, rank, sizes.num_in), key=a),
        mx.random.normal((*experts, sizes.num_out, rank), key=b),
    )


def merged(weights, updates):
    """Returns a model with the updates merged."""
    plain = Model()
    plain.update(weights)
    for name, update in updates.items():
        module = plain
        for part in name.split("."):
            module = module[int(part)] if isinstance(module, list) else module[part]
        module.weight = module.weight + update.b @ update.a
    return plain


@pytest.mark.parametrize("num_rows", [5, 80])  # experts sort from 64 indices on
def test_rows_get_the_update_of_their_slot(num_rows):
    mx.random.seed(0)
    model = Model()
    weights = tree_map_with_path(lambda _, array: array, model.parameters())
    updates = Updates(model, SLOTS_USED, 3, mx.float32)
    experts = {f"{BLOCK}.experts.{name}_proj" for name in ("gate", "up", "down")}
    assert set(updates.layers) == {f"{BLOCK}.first", *experts}
    given = {
        slot: {
            name: low_rank(layer.sizes, 10 * slot + at, 1 + slot % 3)
            for at, (name, layer) in enumerate(updates.layers.items())
            if slot != 2 or at < 2  # one updates some layers only
        }
        for slot in (1, 2, 3)
    }
    for slot, of_slot in given.items():
        updates.write(slot, given[3])  # what was there before leaves nothing
        updates.write(slot, of_slot)
    x = mx.random.normal((num_rows, 1, DIM))
    slots_np = np.arange(num_rows) % 4
    inputs = ForwardInputs(mx.zeros(num_rows, mx.int32), mx.zeros((1, num_rows), mx.int32))
    with bound(inputs.with_extras({updates.extra: mx.array(slots_np.astype(np.uint32))})):
        found = np.array(model.hidden(x))
    with bound(inputs):
        plain = np.array(model.hidden(x))
    for slot in range(4):
        expected = np.array(merged(weights, given.get(slot, {})).hidden(x))
        mine = slots_np == slot
        np.testing.assert_allclose(found[mine], expected[mine], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(plain[slots_np == 0], found[slots_np == 0], rtol=1e-5, atol=1e-5)


def test_only_named_modules_are_adapted_and_memory_is_what_is_said():
    model = Model()
    gc.collect()  # what other tests left
    before = mx.get_active_memory()
    updates = Updates(model, 2, 4, mx.float32, ["first", "down_proj"])
    assert set(updates.layers) == {f"{BLOCK}.first", f"{BLOCK}.experts.down_proj"}
    one = 4 * 4 * (2 * DIM + EXPERTS * (INNER + DIM))
    assert updates.slot_bytes == one
    assert updates.nbytes == 3 * one <= mx.get_active_memory() - before


def test_a_forward_without_adapters_reads_none():
    updates = Updates(Model(), 2, 4, mx.float32)
    inputs = ForwardInputs(mx.zeros(2, mx.int32), mx.zeros((1, 2), mx.int32))
    assert updates.variables(inputs) is None
    with_slots = inputs.with_extras({updates.extra: mx.zeros(2)})
    assert updates.variables(with_slots) == updates.matrices


def test_layers_that_no_slot_updates_compute_nothing_more():
    model = Model()
    updates = Updates(model, 2, 4, mx.float32)
    first = updates.extra
    first_layer = f"{BLOCK}.first"
    updates.write(1, {first_layer: low_rank(updates.layers[first_layer].sizes, 1, 2)})
    assert updates.extra != first
    inputs = ForwardInputs(mx.zeros(2, mx.int32), mx.zeros((1, 2), mx.int32))
    inputs = inputs.with_extras({updates.extra: mx.array([0, 1], mx.uint32)})
    assert set(updates.variables(inputs)) == {first_layer}
    with bound(inputs):
        products = record(lambda x: [model.hidden(x)], [mx.ones((2, 1, DIM))]).operations
    assert [step.kind for step in products].count("GatherMM") == 3 + 2
    updates.write(1, {})
    assert updates.extra not in (first, inputs.extras[0][0])
