# SPDX-License-Identifier: Apache-2.0
"""Layers with rotation in the write compute the same as with their own rotation."""

from collections import Counter

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.models.test_compiled import Texts

from metal_kernels import kernel
from tests import dispatches
from tests.metal_kernels.doubles import Digesting
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.patches.mlx_patches import rotations

UNROTATING = KernelBackend(rotates=False)
BLOCK = 16


class Turns:
    """Counts writes by the number of rotated elements per row."""

    def __init__(self, compiler):
        self.compiler, self.writes = compiler, Counter()

    def metal_kernel(self, name, **text):
        run = self.compiler(name=name, **text)

        def call(**call):
            if name == "kv_write":
                self.writes[dict(call["template"])["DIMS"]] += 1
            return run(**call)

        return call


def model_of(family, layers=2):
    mx.random.seed(3)
    model = dispatches.make_model(family, layers)
    mx.eval(model.parameters())
    return model


def run_of(model, family, backend, dtype=mx.float32):
    layers = attention_layers(model, family)
    states = {layer.name: layer.allocate(40, BLOCK, dtype, backend) for layer in layers}
    return ModelExecutor(ModelParts(model), layers, states, dict.fromkeys(states, 0), BLOCK)


def served(run, steps=(20, 1, 1, 3, 1)):
    """Returns [R, V] logits of steps of two requests with these row counts."""
    tokens = np.random.default_rng(0).integers(0, 64, (2, sum(steps))).tolist()
    texts = Texts(run, tokens)
    return np.stack([texts.step(count) for count in steps])


@pytest.mark.parametrize(
    ("family", "dims"),
    [
        ("llama", {64}),
        pytest.param("gpt_oss", {64}, marks=pytest.mark.more),
        ("deepseek_v3", {64}),
    ],
)
def test_a_write_that_rotates_changes_no_logits(family, dims):
    """Rotates keys, queries and latents, by a base or a list of frequencies."""
    model, turns = model_of(family), Turns(metal_interpreter.metal_kernel)
    with kernel.using(turns.metal_kernel):
        found = served(run_of(model, family, KERNELS))
        assert set(turns.writes) == dims
        before = turns.writes.total()
        wanted = served(run_of(model, family, UNROTATING))
    assert turns.writes[0] == before
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.more
def test_a_graph_that_was_traced_rotates_too(monkeypatch):
    monkeypatch.setattr(kernel, "in_graphs", lambda: True)
    model, turns = model_of("llama"), Turns(Digesting().metal_kernel)
    steps = (5, *[1] * 8)
    with kernel.using(turns.metal_kernel):
        run = run_of(model, "llama", KERNELS)
        found = served(run, steps)
        built = turns.writes.total()
        monkeypatch.setattr(kernel, "in_graphs", lambda: False)
        wanted = served(run_of(model, "llama", KERNELS), steps)
    assert set(turns.writes) == {64}
    assert built < turns.writes.total() - built  # graphs call no Python
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=2e-4)


def test_nothing_is_noted_where_mlxs_operations_serve(monkeypatch):
    run = run_of(model_of("llama"), "llama", SCATTER)
    monkeypatch.setattr(rotations, "noted", None)
    assert np.isfinite(served(run)).all()


@pytest.mark.parametrize("what", ["keys", pytest.param("queries", marks=pytest.mark.more)])
def test_rows_that_are_changed_after_their_rotation_are_taken_as_they_are(what, monkeypatch):
    """The layer changes rows after rotation, unlike when it was traced."""
    model, turns = model_of("llama"), Turns(metal_interpreter.metal_kernel)
    with kernel.using(turns.metal_kernel):
        rotating, plain = (run_of(model, "llama", each) for each in (KERNELS, UNROTATING))
        rope = type(model.layers[0].self_attn.rope)
        call = rope.__call__
        changed = {"keys": 2, "queries": 8}[what]

        def more(self, x, offset=0):
            turned = call(self, x, offset=offset)
            return turned * 0.5 if x.shape[1] == changed else turned

        monkeypatch.setattr(rope, "__call__", more)
        found, wanted = served(rotating), served(plain)
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=2e-5)
