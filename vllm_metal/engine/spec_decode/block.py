# SPDX-License-Identifier: Apache-2.0
"""Block drafters: one forward drafts all tokens of a request's block (DFlash, DFlash2, DSpark)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_config

from vllm_metal.engine.attention.context_layer import ContextLayer
from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.memory.profile import LargestStep
from vllm_metal.engine.models import loader
from vllm_metal.engine.models.compiled import CompiledForward, Graphs
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.engine.spec_decode import vocabulary
from vllm_metal.engine.spec_decode.block_config import BlockConfig
from vllm_metal.engine.spec_decode.block_drafter import BlockDrafter, draft_layers, join_target
from vllm_metal.engine.spec_decode.network import DraftNetwork, DraftPool
from vllm_metal.engine.spec_decode.proposer import DraftRequest, Drafts, Proposer
from vllm_metal.engine.spec_decode.spans import Spans
from vllm_metal.identity import model_files
from vllm_metal.settings.additional_config import AdditionalConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_metal.engine.spec_decode.draft_writer import DraftWriter

#: The embedding of the mask's token, in checkpoints that have one apart.
_MASK_EMBEDDING = "mask_embedding.pt"


class BlockNetwork(DraftNetwork):
    """A block drafter loaded for its target, whose forwards write the drafter's context K/V."""

    def __init__(self, config: VllmConfig, target: ModelParts) -> None:
        """Loads the drafter and makes the target's forwards write its K/V from now on.

        Args:
            config: vLLM's; its speculative_config names the checkpoint.
            target: the model that the drafter was trained for.

        Raises:
            loader.ModelLoadError: the checkpoint cannot be loaded, or is for another target.
            NotImplementedError: the target does not expose the hidden states that it needs.
        """
        speculation = config.speculative_config
        assert speculation is not None
        model_config = speculation.draft_model_config
        (architecture, *_) = model_config.architectures  # the platform has refused all others
        folder = model_files.model_folder(model_config, config, model_files.HEAD_PATTERNS)
        published = load_config(folder)
        given = model_config.hf_config.to_dict()
        shape = BlockConfig.of(given, published, architecture)
        loader.check_draft_vocabulary(config)
        pool_dtype = loader.mlx_dtype(config)
        dtype = mx.float32 if pool_dtype == mx.float32 else mx.bfloat16
        drafter = BlockDrafter(shape, dtype, pool_dtype)
        _load(drafter, config, folder)
        vocabulary.check_block_drafter(drafter, config, target)
        drafter.attach_ends(target)
        self.layers = draft_layers(shape, dtype)
        self.context_layers = [ContextLayer.of(layer) for layer in self.layers]
        self._config, self.drafter = config, drafter
        self._num_drafts = speculation.num_speculative_tokens
        join_target(drafter, target)

    def profile(self, backend: KVBackend) -> None:
        num_rows = self.drafter.config.num_rows(self._num_drafts)
        scheduler = self._config.scheduler_config
        num_reqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // num_rows)
        largest = LargestStep.of(
            self.layers,
            self._config,
            backend,
            drafts=num_rows - 1,
            num_reqs=max(num_reqs, 1),
        )
        with largest.caches() as caches:
            ids = largest.rows.input_ids.reshape(-1, num_rows)
            drafts = self.drafter.draft(ids, caches)
        mx.eval(drafts)

    def proposer(self, pool: DraftPool) -> Proposer:
        own = {layer.name: pool.layer_states[layer.name] for layer in self.layers}
        block_size = self._config.cache_config.block_size
        paged = PagedLayers(self.layers, own, pool.group_of, block_size)
        placed = paged, pool.block_tables, pool.graphs
        return BlockProposer(self.drafter, *placed, self._num_drafts)

    def writer(self, pool: DraftPool, requests: Requests) -> DraftWriter | None:
        return None


def _load(drafter: BlockDrafter, config: VllmConfig, folder: Path) -> None:
    """Loads the checkpoint's weights into the drafter.

    Raises:
        loader.ModelLoadError: weights are missing, unreadable, or of another network.
    """
    assert config.speculative_config is not None
    model_config = config.speculative_config.draft_model_config
    arrays = loader.load_weights(model_config, config, dtype=drafter.dtype)
    mask = arrays.pop("mask_embedding", None)
    bits = AdditionalConfig.of(config).draft_quantization
    try:
        drafter.load(arrays, bits)
    except ValueError as error:
        raise loader.ModelLoadError(
            f"the weights of {model_config.model} do not match its config.json: {error}"
        ) from error
    path = folder / _MASK_EMBEDDING
    if mask is None and path.is_file():
        found = torch.load(path, map_location="cpu", weights_only=True)
        found = found["embedding"] if isinstance(found, dict) else found
        mask = mx.array(found.float().numpy())
    if mask is not None:
        drafter.mask_embedding = mask.reshape(-1).astype(drafter.dtype)


@dataclass(frozen=True)
class _BlockInputs:
    """Inputs of a pass over R blocks of L tokens each."""

    anchors: mx.array  # [R] int32, each request's newest token
    positions: mx.array  # [R * L] int32


class BlockProposer(Proposer):
    """Drafts in one pass over a block per request: its newest token followed by mask tokens.

    The target's step has written the context's K/V. The next step of the target overwrites the
    slots that a block's own K/V take, so there is nothing to roll back. All blocks have the same
    width, whatever number of drafts is wanted, since drafts depend on it. Only over a pool that
    MLX's scatter writes does a pass wait for the device.
    """

    reads_text = False

    def __init__(
        self,
        drafter: BlockDrafter,
        paged: PagedLayers,
        tables: BlockTables,
        graphs: Graphs,
        num_drafts: int,
    ) -> None:
        """
        Args:
            drafter: loaded, with an embedding and an output head.
            paged: the drafter's layers over the shared pool.
            tables: the requests' block tables.
            graphs: says whether passes may be compiled, and counts the compiled ones.
            num_drafts: K, the drafts of a block.
        """
        self._drafter, self._paged, self._tables = drafter, paged, tables
        self._num_drafts = num_drafts
        self._num_rows = drafter.config.num_rows(num_drafts)
        self._forward = CompiledForward(self._build, drafter, paged.own_states, graphs)

    def propose(self, request: DraftRequest) -> Drafts:
        limits = request.limits_within(self._num_drafts)
        # Where the text ends before the block does, there is no room for its rows.
        last_start = request.token_ids_np.shape[1] - self._num_rows
        limits[request.most_tokens_np - 1 > last_start] = 0
        if np.count_nonzero(limits) == len(limits):
            return Drafts(self._pass(request), limits)
        of_all = mx.zeros((len(limits), self._num_drafts), mx.int32)
        drafting = np.flatnonzero(limits)
        if len(drafting):
            of_all[mx.array(drafting)] = self._pass(request.select(drafting))
        return Drafts(of_all, limits)

    def _pass(self, request: DraftRequest) -> mx.array:
        """Drafts for R requests: [R, K] int32."""
        starts = request.most_tokens_np - np.int32(1)
        spans = Spans(request.req_indices_np, starts, starts + np.int32(self._num_rows))
        anchors = _newest_tokens(request)
        rows = spans.rows(anchors, None, request.lag)  # the forward adds the mask tokens
        self._paged.begin_step()
        plans = self._paged.plans(rows, self._tables)
        inputs = _BlockInputs(anchors, rows.positions)
        (drafts,) = self._forward(inputs, plans, len(rows.positions_np))
        if self._paged.pipelined:
            mx.async_eval(drafts)  # the device works while the host lays out the step
        else:
            mx.eval(drafts)  # scatter writes when all reads are done, see kv_cache.scatter
        return drafts

    def _build(self, inputs: _BlockInputs, plans: Sequence[object]) -> list[mx.array]:
        masks, mask_id = [(0, 0), (0, self._num_rows - 1)], self._drafter.config.mask_token_id
        input_ids = mx.pad(inputs.anchors[:, None], masks, constant_values=mask_id)
        with self._paged.during(inputs.positions, plans) as caches:
            return [self._drafter.draft(input_ids, caches)]


def _newest_tokens(request: DraftRequest) -> mx.array:
    """[R] int32, each request's newest accepted token, from the device if the host lacks it."""
    unread = request.unread
    if unread is not None and np.count_nonzero(unread.counts_np) == len(unread.counts_np):
        return unread.newest_ids
    known_np = request.token_ids_np[request.req_indices_np, request.num_tokens_np - 1]
    if unread is None:
        return mx.array(known_np)
    return mx.where(mx.array(unread.counts_np > 0), unread.newest_ids, mx.array(known_np))
