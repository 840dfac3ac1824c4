# SPDX-License-Identifier: Apache-2.0
"""Updates reach the corresponding weights of mlx-lm's model."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma3_text
from mlx_lm.models.switch_layers import SwitchGLU

from vllm_metal.engine.lora.adapter import Adapter, LowRank
from vllm_metal.engine.lora.files import AdapterError
from vllm_metal.engine.lora.names import on_modules

EXPERTS, OUTER, INNER = 3, 6, 4


def update(num_in, num_out, seed, experts=()):
    a = mx.random.normal((*experts, 2, num_in), key=mx.random.key(seed))
    return LowRank(a, mx.random.normal((*experts, num_out, 2), key=mx.random.key(seed + 100)))


def delta(low_rank):
    return np.array(low_rank.b @ low_rank.a)


class Model(nn.Module):
    """A model with the test's `sanitize`."""

    def __init__(self, sanitize):
        super().__init__()
        self.layers = [nn.Module(), nn.Module()]
        for layer in self.layers:
            layer.mlp = nn.Module()
            layer.mlp.switch_mlp = SwitchGLU(OUTER, INNER, EXPERTS)
        self._sanitize = sanitize

    def sanitize(self, weights):
        return self._sanitize(weights)


def placed(updates, sanitize, **options):
    return on_modules(Adapter("mine", updates, True, **options), Model(sanitize))


def test_a_model_that_splits_and_reorders_rows_and_columns():
    def sanitize(weights):
        w = weights.pop("old.qk.weight")
        q, k = mx.split(w, 2, axis=0)
        q = q.reshape(2, 2, 5)[:, ::-1].reshape(4, 5)
        return {"q.weight": q, "k.weight": k[:, mx.array([4, 3, 2, 1, 0])]}

    given = update(5, 8, 1)
    found = placed({"old.qk": given}, sanitize)
    of_weights = sanitize({"old.qk.weight": mx.array(delta(given))})
    for name in ("q", "k"):
        np.testing.assert_allclose(delta(found[name]), of_weights[f"{name}.weight"], atol=1e-5)


def test_matrices_the_other_way_round():
    given = update(5, 8, 2)
    found = placed({"c": given}, lambda w: {"c.weight": w["c.weight"].T}, fan_in_fan_out=True)
    np.testing.assert_allclose(delta(found["c"]), delta(given), atol=1e-6)
    with pytest.raises(AdapterError, match="parts of c"):
        placed({"c": given}, lambda w: {"c.weight": w["c.weight"].T})


def test_a_model_that_multiplies_rows_and_looks_for_other_weights():
    """mlx-lm's Falcon-H1 folds factors into its weights."""
    factors = mx.array([0.3, 7.0, -1.5])[:, None]

    def sanitize(weights):
        assert weights["conv1d.weight"].shape[-1] > 1  # a checkpoint of transformers'
        return {"in_proj.weight": weights["in_proj.weight"] * factors}

    given = update(5, 3, 4)
    found = placed({"in_proj": given}, sanitize)
    np.testing.assert_allclose(delta(found["in_proj"]), factors * delta(given), atol=1e-5)


def test_experts_of_one_parameter_alone():
    """mlx-lm's Qwen3.5 expects both parameters where it finds one."""

    def sanitize(weights):
        middle = weights["layers.0.mlp.experts.gate_up_proj"]
        del weights["layers.0.mlp.experts.down_proj"]
        stem = "layers.0.mlp.switch_mlp"
        return {
            f"{stem}.gate_proj.weight": middle[:, :INNER],
            f"{stem}.up_proj.weight": middle[:, INNER:],
        }

    given = update(OUTER, 2 * INNER, 1, (EXPERTS,))
    found = placed({"layers.0.mlp.experts": given}, sanitize)
    stem = "layers.0.mlp.switch_mlp"
    both = np.concatenate([delta(found[f"{stem}.{n}_proj"]) for n in ("gate", "up")], axis=1)
    np.testing.assert_allclose(both, delta(given), atol=1e-6)


def stacking(weights):
    """Stacks experts of a layer as mlx-lm's models do: all or none."""
    for layer in range(2):
        stem = f"layers.{layer}.mlp"
        if "layers.0.mlp.experts.0.up_proj.weight" not in weights and layer == 0:
            return weights
        for name in ("gate_proj", "up_proj", "down_proj"):
            parts = [weights.pop(f"{stem}.experts.{e}.{name}.weight") for e in range(EXPERTS)]
            weights[f"{stem}.switch_mlp.{name}.weight"] = mx.stack(parts)
    return weights


def test_experts_one_by_one_and_some_of_them():
    stem = "layers.1.mlp.experts"
    given = {f"{stem}.{e}.up_proj": update(OUTER, INNER, e) for e in (0, 2)}
    found = placed(given, stacking)
    assert set(found) == {"layers.1.mlp.switch_mlp.up_proj"}
    of_experts = delta(found["layers.1.mlp.switch_mlp.up_proj"])
    np.testing.assert_allclose(of_experts[0], delta(given[f"{stem}.0.up_proj"]), atol=1e-6)
    np.testing.assert_allclose(of_experts[2], delta(given[f"{stem}.2.up_proj"]), atol=1e-6)
    assert not of_experts[1].any()


def test_experts_in_one_array():
    given = {
        "layers.0.mlp.experts.base_layer": update(OUTER, 2 * INNER, 1, (EXPERTS,)),
        "layers.0.mlp.experts": update(INNER, OUTER, 2, (EXPERTS,)),
    }
    found = placed(given, stacking)
    stem = "layers.0.mlp.switch_mlp"
    both = np.concatenate([delta(found[f"{stem}.{n}_proj"]) for n in ("gate", "up")], axis=1)
    np.testing.assert_allclose(both, delta(given["layers.0.mlp.experts.base_layer"]), atol=1e-6)
    down = delta(found[f"{stem}.down_proj"])
    np.testing.assert_allclose(down, delta(given["layers.0.mlp.experts"]), atol=1e-6)


@pytest.mark.parametrize(
    ("sanitize", "named"),
    [
        (lambda w: {"qk.weight": mx.concatenate(list(w.values()))}, "parts of qk"),
        (lambda w: {"k.weight": w["k.weight"]}, "updates q, which the model does not have"),
        (lambda w: {"no.weight": w["no.weight"]}, "updates q, which the model does not have"),
        (lambda w: {key: mx.cumsum(array, 0) for key, array in w.items()}, "parts of"),
    ],
)
def test_what_cannot_be_placed_is_named(sanitize, named):
    with pytest.raises(AdapterError, match=f"'mine' .*{named}"):
        placed({"q": update(5, 8, 1), "k": update(5, 8, 2)}, sanitize)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_drops_its_head_stays_as_it_is(tied):
    """mlx-lm's Gemma 3 drops it without head weights, which adapters never have."""
    settings = {"hidden_size": 8, "intermediate_size": 8, "head_dim": 4, "vocab_size": 16}
    args = gemma3_text.ModelArgs("gemma3_text", num_hidden_layers=1, **settings)
    model = gemma3_text.Model(args)
    if tied:
        model.sanitize({})
    modules, attributes = list(model), dict(vars(model))
    given = update(8, 8, 1)
    name = "model.layers.0.mlp.up_proj"
    found = on_modules(Adapter("mine", {name: given}, True), model)
    np.testing.assert_array_equal(delta(found[name]), delta(given))
    assert (list(model), vars(model)) == (modules, attributes)
    assert ("lm_head" in modules, model.tie_word_embeddings) == (not tied, tied)
