# SPDX-License-Identifier: Apache-2.0
"""Draft heads without K/V that read the one hidden state that gave the newest token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.memory.profile import largest_step
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.compiled import CompiledForward, Graphs
from vllm_metal.engine.models.loader import ModelLoadError, mlx_dtype
from vllm_metal.engine.models.parts import HiddenStates, ModelParts
from vllm_metal.engine.spec_decode import vocabulary
from vllm_metal.engine.spec_decode.network import DraftNetwork, DraftPool
from vllm_metal.engine.spec_decode.proposer import DraftRequest, Drafts, Proposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StateHeads(nn.Module):
    """Draft heads that read one hidden state per request and keep no K/V."""

    num_heads: int  # most guesses
    hidden_size: int  # of the target

    def __call__(self, hidden: mx.array, newest: mx.array, num_heads: int) -> mx.array:
        """
        Args:
            hidden: [N, H] final hidden states of the target.
            newest: [N] int32, the tokens sampled from them.
            num_heads: number of drafts, at least 1.

        Returns:
            [N, num_heads] int32, drafts that follow the newest tokens.
        """
        raise NotImplementedError

    def drafted_tokens(self) -> mx.array:
        """[V] int32, the target's ids of the tokens that the heads can draft."""
        raise NotImplementedError


class StateNetwork(DraftNetwork):
    """Draft heads that read one hidden state per request, loaded for their target."""

    layers: Sequence[StatefulLayer] = ()

    def __init__(
        self,
        config: VllmConfig,
        target: ModelParts,
        make: Callable[[dict[str, mx.array]], StateHeads],
        what: str,
    ) -> None:
        """Loads the heads and makes the target record its final hidden states from now on.

        Args:
            config: vLLM's; its speculative_config names the checkpoint.
            target: the model that the heads were trained for.
            make: builds the heads from the checkpoint's arrays; raises KeyError or ValueError if
                the arrays do not fit.
            what: name of the kind of heads, for messages.

        Raises:
            ModelLoadError: the checkpoint cannot be loaded, or its target has another hidden size.
            NotImplementedError: the target does not expose its hidden states.
        """
        assert config.speculative_config is not None
        model_config = config.speculative_config.draft_model_config
        weights = loader.load_weights(model_config, config)
        try:
            heads = make(weights)
        except (KeyError, ValueError) as error:
            raise ModelLoadError(f"{model_config.model} contains no {what}: {error}") from error
        mx.eval(heads.parameters())
        hidden_size = config.model_config.get_hidden_size()
        if heads.hidden_size != hidden_size:
            raise ModelLoadError(
                f"{config.speculative_config.model} needs hidden size {heads.hidden_size}, but the "
                f"target's is {hidden_size}: choose heads made for this model"
            )
        vocabulary.check_drafted(heads.drafted_tokens(), config)
        self._config = config
        self._heads = heads
        self._states = HiddenStates(target)
        self._num_drafts = config.speculative_config.num_speculative_tokens

    def profile(self, backend: KVBackend) -> None:
        _, sampled = largest_step(self._config)
        shape = (len(sampled), self._heads.hidden_size)
        hidden = mx.zeros(shape, mlx_dtype(self._config))
        mx.eval(self._heads(hidden, mx.zeros(len(sampled), mx.int32), self._heads.num_heads))

    def proposer(self, pool: DraftPool) -> Proposer:
        return StateProposer(self._heads, self._states, self._num_drafts, pool.graphs)


@dataclass(frozen=True)
class _HeadInputs:
    hidden: mx.array  # [N, H]
    newest: mx.array  # [N] int32
    num_heads: int


class StateProposer(Proposer):
    """Drafts from the hidden state that the newest token was sampled from.

    vLLM does not support these heads with async scheduling, so the host knows that token.
    """

    def __init__(
        self, heads: StateHeads, states: HiddenStates, num_drafts: int, graphs: Graphs | None = None
    ) -> None:
        """
        Args:
            heads: one per draft, or fewer.
            states: the target's hidden states.
            num_drafts: K, the most drafts of a request.
            graphs: says whether passes may be compiled, and counts them; None: they may.
        """
        self._heads = heads
        self._forward = CompiledForward(self._build, heads, (), graphs or Graphs())
        self._states = states
        self._num_drafts = num_drafts
        self._newest: mx.array | None = None  # [T, H] of the newest step
        # By req_idx: first row, its position, count.
        self._rows: dict[int, tuple[int, int, int]] = {}

    def forget_request(self, req_idx: int) -> None:
        self._rows.pop(req_idx, None)

    def take_hidden(self, rows: Rows) -> None:
        self._newest = self._states.take()
        firsts = rows.query_start_loc_np[:-1]
        columns = (firsts, rows.positions_np[firsts], np.diff(rows.query_start_loc_np))
        places = zip(*(column.tolist() for column in columns), strict=True)
        self._rows = dict(zip(rows.req_indices_np.tolist(), places, strict=True))

    def propose(self, request: DraftRequest) -> Drafts:
        req_indices_np, num_tokens_np = request.req_indices_np, request.num_tokens_np
        places = [self._rows.get(req_idx, (0, 0, 0)) for req_idx in req_indices_np.tolist()]
        firsts, starts, counts = np.array(places, np.int64).reshape(-1, 3).T
        offsets = num_tokens_np - 2 - starts  # of the row that the newest token was sampled from
        limits = request.limits_within(min(self._heads.num_heads, self._num_drafts))
        limits[(offsets < 0) | (offsets >= counts)] = 0
        token_ids = mx.zeros((len(req_indices_np), self._num_drafts), mx.int32)
        drafting = np.flatnonzero(limits)
        if len(drafting):
            assert self._newest is not None
            hidden = self._newest[mx.array((firsts + offsets)[drafting].astype(np.int32))]
            newest_np = request.token_ids_np[req_indices_np[drafting], num_tokens_np[drafting] - 1]
            width = int(limits.max())
            inputs = _HeadInputs(hidden, mx.array(newest_np), width)
            (found,) = self._forward(inputs, (), len(drafting))
            token_ids[mx.array(drafting), :width] = found
        return Drafts(token_ids, limits)

    def _build(self, inputs: _HeadInputs, _: Sequence[object]) -> list[mx.array]:
        return [self._heads(inputs.hidden, inputs.newest, inputs.num_heads)]
