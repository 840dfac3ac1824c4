# SPDX-License-Identifier: Apache-2.0
"""A model's rows, states and head apart give what it gives in one piece."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama

from vllm_metal.models import parts

CACHES = [None] * 2  # without caches every row is a text of one token


@pytest.fixture
def model():
    mx.random.seed(1)
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=96,
        )
    )


def test_only_chosen_rows_reach_the_head(model):
    rows = parts.SelectedRows(model)
    ids = mx.array([3, 1, 4, 1, 5], mx.int32)
    every = rows.logits(model, ids, CACHES, None)
    some = rows.logits(model, ids, CACHES, mx.array([4, 1]))
    assert some.shape == (2, 96)
    np.testing.assert_allclose(np.array(some), np.array(every)[[4, 1]], atol=1e-6)
    again = rows.logits(model, ids, CACHES, None)
    assert again.shape == (5, 96)


def test_the_head_may_come_later_and_piece_by_piece(model):
    ids = mx.array([3, 1, 4, 1, 5], mx.int32)
    expected = np.array(model(ids[:, None])[:, 0])
    rows = parts.SelectedRows(model)
    states = rows.states(model, ids, CACHES)
    assert states.shape == (5, 1, 64)
    pieces = [rows.head(model, states[:2]), rows.head(model, states[2:])]
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-6)
    again = rows.logits(model, ids, CACHES, None)
    np.testing.assert_allclose(np.array(again), expected, atol=1e-6)


def test_a_head_that_fails_leaves_nothing_behind(model):
    ids = mx.array([3, 1, 4, 1, 5], mx.int32)
    expected = np.array(model(ids[:, None])[:, 0])
    rows = parts.SelectedRows(model)
    with pytest.raises(ValueError, match="matmul"):
        rows.head(model, mx.zeros((2, 1, 63)))
    again = rows.logits(model, ids, CACHES, None)
    np.testing.assert_allclose(np.array(again), expected, atol=1e-6)


class Undivided(llama.LlamaModel):
    """Returns logits itself."""

    def __call__(self, inputs, cache=None):
        return self.embed_tokens.as_linear(super().__call__(inputs, cache))


def test_a_model_without_a_head_of_its_own_gives_logits_for_states(model):
    undivided = Undivided(model.args)
    ids = mx.array([3, 1, 4, 1, 5], mx.int32)
    expected = np.array(undivided(ids[:, None])[:, 0])
    rows = parts.SelectedRows(undivided)
    states = rows.states(undivided, ids, CACHES)
    np.testing.assert_allclose(rows.head(undivided, states[1:4]), expected[1:4], atol=1e-6)
    some = rows.logits(undivided, ids, CACHES, mx.array([4, 1]))
    np.testing.assert_allclose(np.array(some), expected[[4, 1]], atol=1e-6)


def test_hidden_states_of_all_rows_reach_whoever_asked_though_the_head_sees_a_few(model):
    tokens = mx.arange(7)
    states = [model.model.embed_tokens(tokens[:, None])]
    for layer in model.model.layers:
        states.append(layer(states[-1], None))
    selected = parts.SelectedRows(model)
    final = parts.HiddenStates(model, selected)
    layered = parts.HiddenStates(model, selected, [1, 2])
    out = selected.logits(model, tokens, CACHES, mx.array([6]))
    assert out.shape == (1, 96)
    of_layers = mx.concatenate(states[1:], axis=-1)[:, 0]
    np.testing.assert_allclose(np.array(layered.take()), np.array(of_layers), atol=1e-5)
    expected = model.model.norm(states[-1])[:, 0]
    np.testing.assert_allclose(np.array(final.take()), np.array(expected), atol=1e-5)


def test_a_layer_the_target_lacks_is_named(model):
    selected = parts.SelectedRows(model)
    with pytest.raises(NotImplementedError, match="after layer 3 of a model that has 2"):
        parts.HiddenStates(model, selected, [1, 3])
