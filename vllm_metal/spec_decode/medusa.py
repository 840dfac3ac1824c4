# SPDX-License-Identifier: Apache-2.0
"""Medusa as a proposer: heads that each guess one token further from one hidden state.

Cai et al. 2024, arXiv:2401.10774; the likeliest token of each head, not their tree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.kv_cache.region import Region
from vllm_metal.models import loader
from vllm_metal.models.layers import AttentionLayer
from vllm_metal.models.profile import largest_step
from vllm_metal.requests import BlockTables
from vllm_metal.rows import Rows
from vllm_metal.spec_decode.model import DraftNetwork
from vllm_metal.spec_decode.proposer import Drafts, Proposer

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class MedusaHeads(nn.Module):
    """Head k guesses the token k + 2 behind the hidden state's; the model itself gives the first.

    A head is a stack of residual blocks, x + silu(linear(x)), and a projection to the vocabulary.
    """

    def __init__(self, weights: Mapping[str, mx.array]) -> None:
        """
        Args:
            weights: the checkpoint's arrays, by names of `blocks.HEAD.layers.LAYER`,
                `lm_heads.HEAD` or, shared by all heads, `lm_head`, and perhaps `token_map`.

        Raises:
            KeyError: these are no Medusa heads.
        """
        super().__init__()
        self.num_heads = sum(f"blocks.{head}.layers.0.weight" in weights for head in range(100))
        self.hidden_size = weights["blocks.0.layers.0.weight"].shape[0]
        self.blocks = [_ResidualBlock(weights, f"blocks.{head}") for head in range(self.num_heads)]
        self._shared = "lm_head.weight" in weights
        num_tokens = weights["lm_head.weight" if self._shared else "lm_heads.0.weight"].shape[0]
        if "token_map" in weights:
            self.token_map = mx.zeros_like(weights["token_map"])
        if self._shared:
            self.lm_head = nn.Linear(self.hidden_size, num_tokens, bias=False)
        else:
            self.lm_heads = [
                nn.Linear(self.hidden_size, num_tokens, bias=False) for _ in range(self.num_heads)
            ]

    def __call__(self, hidden: mx.array, num_heads: int) -> mx.array:
        """[N, num_heads] int32: the guesses of the first heads from [N, H] hidden states."""
        columns = []
        for index, block in enumerate(self.blocks[:num_heads]):
            project = self.lm_head if self._shared else self.lm_heads[index]
            columns.append(mx.argmax(project(block(hidden)), axis=-1))
        found = mx.stack(columns, axis=1)
        if "token_map" in self:  # the heads know the most frequent tokens only
            found = self.token_map[found]
        return found.astype(mx.int32)


class _ResidualBlock(nn.Module):
    def __init__(self, weights: Mapping[str, mx.array], name: str) -> None:
        super().__init__()
        self.layers: list[nn.Linear] = []
        while (weight := weights.get(f"{name}.layers.{len(self.layers)}.weight")) is not None:
            bias = f"{name}.layers.{len(self.layers)}.bias" in weights
            self.layers.append(nn.Linear(weight.shape[1], weight.shape[0], bias=bias))

    def __call__(self, hidden: mx.array) -> mx.array:
        for layer in self.layers:
            hidden = hidden + nn.silu(layer(hidden))
        return hidden


class Medusa(DraftNetwork):
    """Heads loaded for their target."""

    layers: Sequence[AttentionLayer] = ()

    def __init__(
        self, config: VllmConfig, target: nn.Module, selected: loader.SelectedRows
    ) -> None:
        """Loads them, and has the target's final hidden states noted from now on.

        Raises:
            loader.ModelLoadError: the checkpoint cannot be loaded.
            NotImplementedError: the target does not show its hidden states.
        """
        speculation = config.speculative_config
        assert speculation is not None
        self._config, self._num_drafts = config, speculation.num_speculative_tokens
        model_config = speculation.draft_model_config
        weights = _renamed(loader.load_weights(model_config, config))
        try:
            self.heads = MedusaHeads(weights)
            self.heads.load_weights(list(weights.items()))
        except (KeyError, ValueError) as error:
            raise loader.ModelLoadError(
                f"{model_config.model} holds no Medusa heads: {error}"
            ) from error
        mx.eval(self.heads.parameters())
        self._states = loader.HiddenStates(target, selected)

    def profile(self, region_type: type[Region]) -> None:
        _, sampled = largest_step(self._config)
        shape = (len(sampled), self.heads.hidden_size)
        hidden = mx.zeros(shape, loader.mlx_dtype(self._config))
        mx.eval(self.heads(hidden, self.heads.num_heads))

    def proposer(
        self,
        regions: Mapping[str, Region],
        group_of: Mapping[str, int],
        block_tables: BlockTables,
    ) -> Proposer:
        return MedusaProposer(self.heads, self._states, self._num_drafts)


class MedusaProposer(Proposer):
    """Drafts from the hidden state that the newest token was sampled from."""

    def __init__(self, heads: MedusaHeads, states: loader.HiddenStates, num_drafts: int) -> None:
        """
        Args:
            heads: one for each draft, or fewer.
            states: the target's.
            num_drafts: K, the most drafts of a request.
        """
        self._heads = heads
        self._states = states
        self._num_drafts = num_drafts
        self._newest: mx.array | None = None  # [T, H] of the newest step
        self._rows: dict[int, tuple[int, int, int]] = {}  # by slot: first row, its position, count

    def forget(self, slot: int) -> None:
        self._rows.pop(slot, None)

    def take_hidden(self, rows: Rows) -> None:
        self._newest = self._states.take()
        firsts = rows.query_start_loc_np[:-1]
        columns = (firsts, rows.positions_np[firsts], np.diff(rows.query_start_loc_np))
        places = zip(*(column.tolist() for column in columns), strict=True)
        self._rows = dict(zip(rows.slots_np.tolist(), places, strict=True))

    def propose(
        self,
        token_ids_np: np.ndarray,
        slots_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
    ) -> Drafts:
        places = [self._rows.get(slot, (0, 0, 0)) for slot in slots_np.tolist()]
        firsts, starts, counts = np.array(places, np.int64).reshape(-1, 3).T
        offsets = num_tokens_np - 2 - starts  # of the row that the newest token was sampled from
        fitting = (offsets >= 0) & (offsets < counts)
        most = np.minimum(token_ids_np.shape[1] - num_tokens_np, self._heads.num_heads)
        limits = np.minimum(np.minimum(limits_np, most), self._num_drafts)
        limits = np.where(fitting, np.maximum(limits, 0), 0).astype(np.int32)
        token_ids = mx.zeros((len(slots_np), self._num_drafts), mx.int32)
        drafting = np.flatnonzero(limits)
        if len(drafting):
            assert self._newest is not None
            rows = mx.array((firsts + offsets)[drafting].astype(np.int32))
            width = int(limits.max())
            token_ids[mx.array(drafting), :width] = self._heads(self._newest[rows], width)
        return Drafts(token_ids, limits)


def _renamed(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The checkpoint's arrays under the names of MedusaHeads.

    Medusa's authors have `HEAD.LAYER.linear.weight`, and `HEAD.NUM_LAYERS.weight` for a projection.
    """
    found = {}
    for name, array in weights.items():
        name = name.removeprefix("medusa_heads.")
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        name = re.sub(r"^(\d+)\.\d+\.(weight|bias)$", r"lm_heads.\1.\2", name)
        found[name] = array
    if "blocks.1.layers.0.weight" in found and "lm_heads.1.weight" not in found:
        for name in found.keys() & {"lm_heads.0.weight"}:  # one for all heads
            found["lm_head.weight"] = found.pop(name)
    frequent = found.get("token_map")
    for name, array in found.items():
        if frequent is not None and "lm_head" in name and len(array) > len(frequent):
            found[name] = array[frequent]
    return found
