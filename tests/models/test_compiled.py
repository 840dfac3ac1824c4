# SPDX-License-Identifier: Apache-2.0
"""Steps whose graph MLX builds by itself are those that the model's Python would have built."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from models.test_executor import FAMILIES, NewRequest, build, executor

from vllm_metal.batch.input_batch import prepare
from vllm_metal.batch.requests import BlockTables, Requests
from vllm_metal.models.parts import HiddenStates

NUM_STEPS = 20


class Texts:
    """Requests whose tokens are known, and computed in steps."""

    def __init__(self, run, texts):
        self._run, self._done = run, 0
        self._tables = BlockTables(1, len(texts), 9)
        self._requests = Requests(len(texts), 128, self._tables)
        for index, text in enumerate(texts):
            blocks = list(range(1 + index * 8, 9 + index * 8))
            self._requests.add_request(NewRequest(str(index), text, blocks))

    def step(self, num_tokens):
        """[R, V] logits of the last of the next tokens of each request."""
        states = list(self._requests)
        for state in states:
            self._requests.num_computed_tokens_np[state.req_idx] = self._done
        counts = {state.req_id: num_tokens for state in states}
        batch = prepare(self._requests, counts, mx.zeros(len(states), mx.int32))
        hidden = self._run.forward_hidden(batch, self._tables)
        self._done += num_tokens
        return np.array(self._run.compute_logits(hidden[num_tokens - 1 :: num_tokens]))


def calls(model, monkeypatch):
    """How often the model's Python runs, as a list that grows."""
    made, family = [], type(model)
    call = family.__call__

    def counting(self, *args, **kwargs):
        made.append(len(args))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(family, "__call__", counting)
    return made


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
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


@pytest.mark.parametrize("layer_ids", [None, [1, 3]])
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
