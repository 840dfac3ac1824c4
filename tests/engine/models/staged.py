# SPDX-License-Identifier: Apache-2.0
"""Splits small models into pipeline stages that run one after another in this process."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from engine.models import matrix, recurrent
from engine.models.test_executor import BLOCK, chunk_of, of_states
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.models.executor import ModelExecutor
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.models.stage import HIDDEN, Stage, check_stages

NUM_BLOCKS = 40
LENGTHS = (40, 1, 23)


class Chain:
    """The stages of a model as a single one, for `chunk_by_chunk`."""

    def __init__(self, module: str, weights: Any, cuts: list[int]) -> None:
        self.runs = []
        ends = [0, *cuts]
        for start, end in zip(ends, [*cuts, None], strict=True):
            self.runs.append(stage(module, weights, start, end))

    def forward_hidden(self, batch: Any, tables: Any) -> mx.array:
        hidden = None
        for run in self.runs:
            extras = {} if hidden is None else {HIDDEN: hidden[:, 0]}
            hidden = run.forward_hidden(batch, tables, batch.inputs.with_extras(extras))
        return hidden

    def compute_logits(self, hidden: mx.array) -> mx.array:
        return self.runs[-1].compute_logits(hidden)


def stage(module: str, weights: Any, start: int, end: int | None) -> ModelExecutor:
    model = matrix.small_model(module)
    model.load_weights(weights)
    layers = attention_layers(model, module)
    check_stages(model, layers)
    count = len(model.layers)
    part = Stage(start, count if end is None else end, count)
    part.keep(model)
    own = part.own(layers)
    states = {each.name: each.allocate(NUM_BLOCKS, BLOCK, mx.float32, SCATTER) for each in own}
    parts = ModelParts(model, partial(part.caches, layers=layers))
    return ModelExecutor(parts, own, states, dict.fromkeys(states, 0), BLOCK)


def whole(module: str) -> Any:
    """Makes a small model in which every weight affects the result."""
    mx.random.seed(4)
    model = matrix.small_model(module)
    recurrent.draw(model)
    mx.eval(model.parameters())
    return model


def gap(module: str, model: Any, cuts: list[int]) -> float:
    """Returns the largest logit difference between the stages and mlx-lm's dense forward."""
    rng = np.random.default_rng(3)
    vocab = model(mx.zeros((1, 1), mx.int32)).shape[-1]
    prompts = [rng.integers(3, vocab, n).tolist() for n in LENGTHS]
    dense = [np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0]) for p in prompts]
    chain = Chain(module, tree_flatten(model.parameters()), cuts)
    found = chunk_of(chain, prompts, rng.permutation(np.arange(1, NUM_BLOCKS)), of_states)
    scale = max(float(np.abs(each).max()) for each in dense)
    return max(
        float(np.abs(np.concatenate(parts) - expected).max()) / scale
        for expected, parts in zip(dense, found, strict=True)
    )
