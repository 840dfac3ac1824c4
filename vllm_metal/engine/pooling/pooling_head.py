# SPDX-License-Identifier: Apache-2.0
"""Implements the output head that turns hidden states into vectors with vLLM's pooler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import mlx.core as mx
import numpy as np
import torch
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from vllm_metal.engine.batch.output_head import OutputHead
from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.patches.vllm_patches.step_result import NOT_A_NUMBER, StepResult

if TYPE_CHECKING:
    from vllm.config.pooler import PoolerConfig
    from vllm.model_executor.layers.pooler.abstract import Pooler
    from vllm.pooling_params import PoolingParams
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_metal.engine.batch.input_batch import InputBatch
    from vllm_metal.engine.batch.requests import Requests, RequestState

#: Rows of a prompt that its result depends on.
Needed = Literal["first", "last", "all"]
#: Needed rows by vLLM's name of the pooling type for whole texts.
_NEEDED: dict[str, Needed] = {"LAST": "last", "CLS": "first", "MEAN": "all"}
#: Tasks whose result is one vector per text.
_OF_TEXTS = ("embed", "classify")


def rows_needed(task: str | None, config: PoolerConfig) -> Needed:
    return _NEEDED[config.get_seq_pooling_type()] if task in _OF_TEXTS else "all"


@dataclass
class _Entry:
    """One request's parameters, and the state of its earlier chunks."""

    params: PoolingParams
    needed: Needed
    prompt_token_ids: list[int] | None  # only if the pooler reads them
    states: PoolingStates = field(default_factory=PoolingStates)


@dataclass(frozen=True)
class _RequestSlice:
    """The rows of one request that the pooler gets in a step."""

    index: int  # the request's index in the batch
    entry: _Entry
    rows: range  # in the batch
    prompt_len: int  # for the pooler, which needs the true length only with all rows
    seq_len: int  # likewise; prompt tokens seen including these rows
    done: bool  # the prompt ends here


class PoolingHead(OutputHead):
    """Pools the rows of prompts with vLLM's pooler.

    Only rows that the pooler reads leave the device, for example one row for last-token pooling.
    The host pools them when vLLM requests the step's results.
    """

    at_once = True

    def __init__(self, pooler: Pooler, config: PoolerConfig, requests: Requests) -> None:
        self._pooler = pooler
        self._config = config
        self._requests = requests
        self._entries: dict[int, _Entry] = {}  # by req_idx
        self._begun: tuple[InputBatch, list[_RequestSlice], mx.array] | None = None

    def enter(self, state: RequestState) -> None:
        params = state.request.pooling_params
        assert params is not None and params.task is not None
        self._pooler.get_pooling_updates(params.task).apply(params)
        needed, tokens = rows_needed(params.task, self._config), None
        if params.requires_token_ids:
            needed, tokens = "all", state.prompt_token_ids
        self._entries[state.req_idx] = _Entry(params, needed, tokens)

    def leave(self, req_idx: int) -> None:
        self._entries.pop(req_idx, None)

    def begin(self, batch: InputBatch, hidden_states: mx.array) -> None:
        slices = self._slices(batch)
        rows = [row for part in slices for row in part.rows]
        if len(rows) < len(batch.positions_np):
            hidden_states = hidden_states[mx.array(np.array(rows, np.int32))]
        # float32 holds every dtype of weights exactly; numpy has no bfloat16.
        self._begun = batch, slices, hidden_states[:, 0].astype(mx.float32)

    def finish(self, grammar_output: GrammarOutput | None) -> tuple[StepOutput, list[mx.array]]:
        assert self._begun is not None
        (batch, slices, rows), self._begun = self._begun, None
        # Also without rows to read: a chunk that ends no text still fills the pool.
        return PooledOutput(batch, self._requests, self._pooler, slices, rows), [rows]

    def _slices(self, batch: InputBatch) -> list[_RequestSlice]:
        starts, done = batch.query_start_loc_np.tolist(), set(batch.sampling_np.tolist())
        found = []
        for index, state in enumerate(batch.requests):
            entry, rows = self._entries[state.req_idx], range(*starts[index : index + 2])
            if entry.needed == "all":
                lens = state.num_prompt_tokens, int(batch.seq_lens_np[index])
            elif index not in done:
                continue
            else:
                # A pooler that reads one row gets it as a complete prompt of length 1.
                rows, lens = rows[:1] if entry.needed == "first" else rows[-1:], (1, 1)
            found.append(_RequestSlice(index, entry, rows, *lens, index in done))
        return found


class PooledOutput(StepOutput):
    """A step's rows on the device; the host pools them in `get_output`."""

    def __init__(
        self,
        batch: InputBatch,
        requests: Requests,
        pooler: Pooler,
        slices: Sequence[_RequestSlice],
        rows: mx.array,
    ) -> None:
        """rows: [n, H] float32, of all slices in order."""
        super().__init__(batch, None, {}, requests)
        self._pooler = pooler
        self._slices = slices
        self._rows = rows

    def get_output(self) -> StepResult:
        result = super().get_output()
        pooled: list[torch.Tensor | None] = [None] * len(self.batch.requests)
        for part, found in zip(self._slices, self._pool(), strict=True):
            if not part.done:
                continue
            # NaN fails one request, not the step.
            assert found is not None
            if bool(torch.isnan(found).any()):
                result.failures[self.batch.requests[part.index].req_id] = NOT_A_NUMBER
            else:
                pooled[part.index] = found
        result.pooler_output = pooled
        return result

    def _pool(self) -> Sequence[torch.Tensor | None]:
        rows = torch.from_numpy(np.array(self._rows))
        if not self._slices:
            return ()
        with torch.inference_mode():
            found: Sequence[torch.Tensor | None] = self._pooler(rows, _metadata(self._slices))
        return found


def _metadata(slices: Sequence[_RequestSlice]) -> PoolingMetadata:
    prompt_lens = [part.prompt_len for part in slices]
    token_ids = None
    if any(part.entry.params.requires_token_ids for part in slices):
        token_ids = torch.zeros((len(slices), max(prompt_lens)), dtype=torch.int64)
        for row, part in zip(token_ids, slices, strict=True):
            known = part.entry.prompt_token_ids or ()
            row[: len(known)] = torch.tensor(known)
    metadata = PoolingMetadata(
        prompt_lens=torch.tensor(prompt_lens),
        prompt_token_ids=token_ids,
        prompt_token_ids_cpu=token_ids,
        pooling_params=[part.entry.params for part in slices],
        pooling_states=[part.entry.states for part in slices],
    )
    metadata.build_pooling_cursor(
        np.array([len(part.rows) for part in slices]),
        torch.tensor([part.seq_len for part in slices]),
        torch.device("cpu"),
    )
    return metadata
