# SPDX-License-Identifier: Apache-2.0
"""IBM's MLP speculators: a small recurrent network that starts from one hidden state.

Wertheimer et al. 2024, arXiv:2404.19124; takes each step's likeliest token instead of their tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from vllm_metal.engine.spec_decode import vocabulary
from vllm_metal.engine.spec_decode.newest_state import StateHeads, StateNetwork

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.models.parts import ModelParts

EPS = 1e-6  # of the norms; theirs


class MLPSpeculatorHeads(StateHeads):
    """Step k maps the state s and the newest token t to the next state and the next token:

        s' = gelu(norm_k(proj_k(s) + weight * emb_k(t))),   t' = argmax(head_k(s'))

    The weight keeps the hidden state's share of s' after n_predict steps the same for any width.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
        """
        Args:
            config: config.json; reads `n_predict`, `tie_weights` and `scale_input`.
            weights: the checkpoint's arrays, named `emb.STEP`, `proj.STEP`, `ln.STEP` and
                `head.STEP`. With tied weights, later steps reuse the last array of each kind.

        Raises:
            KeyError: arrays are missing.
            ValueError: there are too few arrays, or their shapes do not fit.
        """
        super().__init__()
        weights = {name.removeprefix("speculator."): array for name, array in weights.items()}
        self.num_heads = int(config["n_predict"])
        inner_size, self.hidden_size = weights["proj.0.weight"].shape
        self._scale_input = bool(config["scale_input"])
        tied = bool(config["tie_weights"])
        counts = {}
        for kind in ("emb", "proj", "ln", "head"):
            found = sum(f"{kind}.{step}.weight" in weights for step in range(self.num_heads))
            counts[kind] = found
            if not found or (found < self.num_heads and not tied):
                raise ValueError(f"{found} of the {self.num_heads} arrays {kind}.STEP.weight")
        if tied:  # the first projection has another width; copies of one array are kept once
            counts |= {"emb": 1, "ln": 1, "proj": min(counts["proj"], 2)}
        vocab_size = weights["head.0.weight"].shape[0]
        self.emb: list[nn.Module] = [
            nn.Embedding(vocab_size, inner_size) for _ in range(counts["emb"])
        ]
        self.proj = [
            nn.Linear(inner_size if step else self.hidden_size, inner_size, bias=False)
            for step in range(counts["proj"])
        ]
        self.ln = [_Norm(inner_size) for _ in range(counts["ln"])]
        self.head = [nn.Linear(inner_size, vocab_size, bias=False) for _ in range(counts["head"])]
        state_weight = 0.5 ** (0.5 / self.num_heads)
        token_weight = math.sqrt((1 - state_weight**2) * (inner_size / 2))
        self._token_weight = token_weight / state_weight
        names = dict(tree_flatten(self.parameters()))
        self.load_weights([(name, weights[name]) for name in names])

    def __call__(self, hidden: mx.array, newest: mx.array, num_heads: int) -> mx.array:
        state, tokens = hidden, newest
        if self._scale_input:
            state = mx.fast.rms_norm(state, None, EPS) / math.sqrt(2)
        columns = []
        for step in range(num_heads):
            embedded = self._token_weight * _of(self.emb, step)(tokens)
            state = nn.gelu(_of(self.ln, step)(_of(self.proj, step)(state) + embedded))
            tokens = mx.argmax(_of(self.head, step)(state), axis=-1).astype(mx.int32)
            columns.append(tokens)
        return mx.stack(columns, axis=1)

    def drafted_tokens(self) -> mx.array:
        return mx.arange(len(self.head[0].weight))


def _of(modules: Sequence[nn.Module], step: int) -> nn.Module:
    return modules[min(step, len(modules) - 1)]


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = mx.ones(size)
        self.bias = mx.zeros(size)

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.weight, EPS) + self.bias


class MLPSpeculator(StateNetwork):
    def __init__(self, config: VllmConfig, target: ModelParts) -> None:
        assert config.speculative_config is not None
        settings = config.speculative_config.draft_model_config.hf_config.to_dict()

        def make(weights: Mapping[str, mx.array]) -> MLPSpeculatorHeads:
            heads = MLPSpeculatorHeads(settings, weights)
            heads.emb = [vocabulary.bounded(each, config) for each in heads.emb]
            return heads

        super().__init__(config, target, make, "MLP speculator")
