# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages give the logits of mlx-lm's dense forward of the whole model."""

import mlx.core as mx
import pytest
from engine.models import doubles, matrix, staged
from engine.models.cases import cases
from mlx.utils import tree_flatten

from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.models.stage import Stage, check_stages
from vllm_metal.engine.models.staged_families import STAGED, STAGED_STATES

pytestmark = pytest.mark.usefixtures("unfused")

#: Largest difference of logits, over the largest logit: sums in another order.
CLOSE = 2e-4


@pytest.mark.parametrize("module", cases(sorted(STAGED), ["qwen3_next"], ["llama", "deepseek_v3"]))
def test_stages_compute_what_the_whole_model_does(monkeypatch, module):
    doubles.install(monkeypatch)
    model = staged.whole(module)
    count = len(model.layers)
    states = any(layer.state_bytes for layer in attention_layers(model, module))
    assert states is (module in STAGED_STATES)
    assert staged.gap(module, model, list(range(1, count))) < CLOSE  # a layer each
    assert staged.gap(module, model, [(count + 1) // 2]) < CLOSE


def test_a_stage_has_the_weights_of_its_layers_alone():
    whole = staged.whole("llama")
    names = {name for name, _ in tree_flatten(whole.parameters())}
    count = len(whole.layers)
    held = []
    for start in range(count):
        model = matrix.small_model("llama")
        Stage(start, start + 1, count).keep(model)
        held.append({name for name, _ in tree_flatten(model.parameters())})
        of_layers = {name for name in held[-1] if ".layers." in name}
        assert of_layers
        assert all(name.startswith(f"model.layers.{start}.") for name in of_layers)
    assert {name for name in held[0] | held[-1] if ".layers." not in name} | set().union(
        *held
    ) == names
    assert "model.embed_tokens.weight" in held[0]
    assert not any("embed_tokens" in name for each in held[1:-1] for name in each)
    assert not any("lm_head" in name for each in held[:-1] for name in each)


def test_a_model_whose_layers_share_k_and_v_is_refused():
    model = matrix.small_model("afm7")
    with pytest.raises(NotImplementedError, match="without a cache of their own"):
        check_stages(model, attention_layers(model, "afm7"))


def test_more_ranks_than_layers_are_refused():
    assert [Stage.of(4, rank, 2).end for rank in range(2)] == [2, 4]
    with pytest.raises(
        ValueError, match="--pipeline-parallel-size=3 exceeds the 2 layers of the model"
    ):
        Stage.of(2, 0, 3)


def test_a_model_that_ends_amid_gives_what_the_next_layer_would_get():
    """Its norm is not applied."""
    whole = staged.whole("llama")
    seen = []
    last = whole.layers[-1]
    family = type(last)

    def noted(self, hidden_states, *args, **kwargs):
        seen.append(hidden_states)
        return family.__call__(self, hidden_states, *args, **kwargs)

    last.__class__ = type("Noted", (family,), {"__call__": noted})
    tokens = mx.array([[7]])
    whole(tokens)
    run = staged.stage(
        "llama", tree_flatten(staged.whole("llama").parameters()), 0, len(whole.layers) - 1
    )
    found = run.parts.dense_hidden([7])
    assert mx.allclose(found, seen[0][0], atol=1e-5).item()
