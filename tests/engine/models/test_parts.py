# SPDX-License-Identifier: Apache-2.0
"""Embedding, hidden states and logits computed separately equal the whole model."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma, llama

from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.models.parts import HiddenStates, ModelParts

CACHES = [None] * 2  # without caches every row is a text of one token
IDS = [3, 1, 4, 1, 5]


def of(ids, embeddings=None):
    return ForwardInputs(ids, mx.zeros((1, ids.size), mx.int32), embeddings)


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


def test_logits_may_come_later_and_chunk_by_chunk(model):
    ids = mx.array(IDS, mx.int32)
    expected = np.array(model(ids[:, None])[:, 0])
    parts = ModelParts(model)
    hidden_states = parts.forward_hidden(of(ids), CACHES)
    assert hidden_states.shape == (5, 1, 64)
    chunks = [parts.compute_logits(hidden_states[:2]), parts.compute_logits(hidden_states[2:])]
    np.testing.assert_allclose(np.concatenate(chunks), expected, atol=1e-6)
    some = parts.compute_logits(hidden_states[mx.array([4, 1])])
    np.testing.assert_allclose(np.array(some), expected[[4, 1]], atol=1e-6)
    # The model itself is as it was.
    np.testing.assert_allclose(np.array(model(ids[:, None])[:, 0]), expected, atol=1e-6)


def small_gemma():
    return gemma.Model(
        gemma.ModelArgs(
            model_type="gemma",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=2,
            head_dim=16,
            rms_norm_eps=1e-5,
            vocab_size=96,
            num_key_value_heads=1,
        )
    )


@pytest.mark.parametrize(
    "make", [small_gemma, lambda: None], ids=["gemma, which scales them", "llama"]
)
def test_embeddings_may_come_from_elsewhere(model, make):
    model = make() or model
    ids, others = mx.array(IDS, mx.int32), mx.array([9, 2, 6, 5, 3], mx.int32)
    parts = ModelParts(model)
    expected = np.array(parts.forward_hidden(of(ids), CACHES))
    embeddings = parts.embed(ids)
    assert embeddings.shape == (5, 1, model.args.hidden_size)
    given = parts.forward_hidden(of(others, embeddings), CACHES)
    np.testing.assert_allclose(np.array(given), expected, atol=1e-6)
    # The embeddings of one call are no other call's.
    assert not np.allclose(np.array(parts.forward_hidden(of(others), CACHES)), expected, atol=1e-3)


class Nameless(llama.LlamaModel):
    """Stores its embedding under an unusual name."""

    def __init__(self, args):
        super().__init__(args)
        self.vocabulary = self.pop("embed_tokens")

    def __call__(self, inputs, cache=None):
        hidden_states = self.vocabulary(inputs)
        for layer in self.layers:
            hidden_states = layer(hidden_states, None)
        return self.norm(hidden_states)


class Untied(llama.Model):
    """Reads the head's weights from a separate layer."""

    def __call__(self, inputs, cache=None):
        return self.lm_head(self.model(inputs, cache))


def test_an_embedding_that_is_not_found_is_said_to_be_missing(model):
    untied = Untied(replace(model.args, tie_word_embeddings=False))
    untied.model = Nameless(model.args)
    parts = ModelParts(untied)
    ids = mx.array(IDS, mx.int32)
    assert parts.forward_hidden(of(ids), CACHES).shape == (5, 1, 64)
    with pytest.raises(NotImplementedError, match="embedding is not where"):
        parts.embed(ids)
    with pytest.raises(NotImplementedError, match="embedding is not where"):
        parts.forward_hidden(of(ids, mx.zeros((5, 1, 64))), CACHES)


def test_a_call_that_fails_leaves_nothing_for_the_next(model):
    ids = mx.array(IDS, mx.int32)
    expected = np.array(model(ids[:, None])[:, 0])
    parts = ModelParts(model)
    with pytest.raises(ValueError, match="matmul"):
        parts.compute_logits(mx.zeros((2, 1, 63)))
    with pytest.raises(ValueError, match=r"matmul|shape|norm"):
        parts.forward_hidden(of(ids, mx.zeros((5, 1, 63))), CACHES)
    again = parts.compute_logits(parts.forward_hidden(of(ids), CACHES))
    np.testing.assert_allclose(np.array(again), expected, atol=1e-6)


class Undivided(llama.LlamaModel):
    """Returns logits itself."""

    def __call__(self, inputs, cache=None):
        return self.embed_tokens.as_linear(super().__call__(inputs, cache))


def test_a_model_without_a_head_of_its_own_gives_logits_for_hidden_states(model):
    undivided = Undivided(model.args)
    ids = mx.array(IDS, mx.int32)
    expected = np.array(undivided(ids[:, None])[:, 0])
    parts = ModelParts(undivided)
    hidden_states = parts.forward_hidden(of(ids), CACHES)
    logits = parts.compute_logits(hidden_states[1:4])
    np.testing.assert_allclose(np.array(logits), expected[1:4], atol=1e-6)
    with pytest.raises(NotImplementedError, match="cannot be separated from its head"):
        HiddenStates(parts)


def test_hidden_states_of_all_rows_reach_whoever_asked(model):
    tokens = mx.arange(7)
    states = [model.model.embed_tokens(tokens[:, None])]
    for layer in model.model.layers:
        states.append(layer(states[-1], None))
    target = ModelParts(model)
    final, layered = HiddenStates(target), HiddenStates(target, [1, 2])
    hidden_states = target.forward_hidden(of(tokens), CACHES)
    assert target.compute_logits(hidden_states[mx.array([6])]).shape == (1, 96)
    of_layers = mx.concatenate(states[1:], axis=-1)[:, 0]
    np.testing.assert_allclose(np.array(layered.take()), np.array(of_layers), atol=1e-5)
    expected = model.model.norm(states[-1])[:, 0]
    np.testing.assert_allclose(np.array(final.take()), np.array(expected), atol=1e-5)


class WithKeys(llama.TransformerBlock):
    """Returns keys and values for later layers, as Gemma 4 and Hunyuan do."""

    def __call__(self, x, mask=None, cache=None):
        return super().__call__(x, mask, cache), (x, x), None


class ReadsKeys(llama.LlamaModel):
    def __call__(self, inputs, cache=None, input_embeddings=None):
        hidden = self.embed_tokens(inputs)
        for layer in self.layers:
            hidden, _, _ = layer(hidden)
        return self.norm(hidden)


def test_hidden_states_of_layers_that_return_more(model):
    tokens, plain = mx.arange(7), ModelParts(model)
    expected = HiddenStates(plain, [1, 2])
    plain.forward_hidden(of(tokens), CACHES)
    expected_states = np.array(expected.take())
    model.model.__class__ = ReadsKeys
    for layer in model.model.layers:
        layer.__class__ = WithKeys
    parts = ModelParts(model)
    found = HiddenStates(parts, [1, 2])
    parts.forward_hidden(of(tokens), CACHES)
    np.testing.assert_allclose(np.array(found.take()), expected_states, atol=1e-5)


def test_a_layer_the_target_lacks_is_named(model):
    with pytest.raises(NotImplementedError, match=r"layer 3 .*, but the model has 2 layers"):
        HiddenStates(ModelParts(model), [1, 3])


def test_a_draft_head_shares_the_ends_of_its_target(model):
    untied = llama.Model(replace(model.args, tie_word_embeddings=False))
    assert ModelParts(untied).output_head is untied.lm_head
    parts = ModelParts(model)
    assert parts.input_embedding is model.model.embed_tokens
    hidden_states = mx.random.normal((3, 1, 64), key=mx.random.key(0))
    expected = hidden_states @ model.model.embed_tokens.weight.T
    logits = parts.output_head(hidden_states)
    np.testing.assert_allclose(np.array(logits), np.array(expected), atol=1e-5)
