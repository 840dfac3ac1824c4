# SPDX-License-Identifier: Apache-2.0
"""PoolingEnd: the end of steps that has vLLM's pooler make vectors of hidden states."""

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

#: Rows of a prompt that its result is made of.
Needed = Literal["first", "last", "all"]
#: By the way of pooling whole texts, as vLLM names it.
_NEEDED: dict[str, Needed] = {"LAST": "last", "CLS": "first", "MEAN": "all"}
#: Tasks whose result is one vector a text.
_OF_TEXTS = ("embed", "classify")


def rows_needed(task: str | None, config: PoolerConfig) -> Needed:
    """The rows of a prompt that a task reads.

    Args:
        task: of the request.
        config: has how texts are pooled.
    """
    return _NEEDED[config.get_seq_pooling_type()] if task in _OF_TEXTS else "all"


@dataclass
class _Entry:
    """One request's wishes, and what is kept of its earlier chunks."""

    params: PoolingParams
    needed: Needed
    prompt_token_ids: list[int] | None  # where the pooler reads them
    states: PoolingStates = field(default_factory=PoolingStates)


@dataclass(frozen=True)
class _Share:
    """The rows that the pooler gets of one request of a step."""

    index: int  # of the request in the batch
    entry: _Entry
    rows: range  # in the batch
    prompt_len: int  # as the pooler is told: of whole prompts alone it needs the true one
    seq_len: int  # likewise; what it has seen of the prompt, with these rows
    done: bool  # the prompt ends here


class PoolingHead(OutputHead):
    """Pools the rows of prompts as vLLM's pooler says.

    Only rows that the pooler reads leave the device: of a text whose last token counts, one row.
    The host pools them when vLLM asks for the step's results.
    """

    at_once = True

    def __init__(self, pooler: Pooler, config: PoolerConfig, requests: Requests) -> None:
        """
        Args:
            pooler: vLLM's; it takes torch tensors on the CPU.
            config: has how texts are pooled.
            requests: of the runner.
        """
        self._pooler = pooler
        self._config = config
        self._requests = requests
        self._entries: dict[int, _Entry] = {}  # by req_idx
        self._begun: tuple[InputBatch, list[_Share], mx.array] | None = None

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
        shares = self._shares(batch)
        rows = [row for share in shares for row in share.rows]
        if len(rows) < len(batch.positions_np):
            hidden_states = hidden_states[mx.array(np.array(rows, np.int32))]
        # float32 holds every dtype of weights exactly; numpy has no bfloat16.
        self._begun = batch, shares, hidden_states[:, 0].astype(mx.float32)

    def finish(self, grammar_output: GrammarOutput | None) -> tuple[StepOutput, list[mx.array]]:
        assert self._begun is not None
        (batch, shares, rows), self._begun = self._begun, None
        # Also where no row is read: a chunk that ends no text fills the pool.
        return PooledOutput(batch, self._requests, self._pooler, shares, rows), [rows]

    def _shares(self, batch: InputBatch) -> list[_Share]:
        starts, done = batch.query_start_loc_np.tolist(), set(batch.sampling_np.tolist())
        found = []
        for index, state in enumerate(batch.requests):
            entry, rows = self._entries[state.req_idx], range(*starts[index : index + 2])
            if entry.needed == "all":
                lens = state.num_prompt_tokens, int(batch.seq_lens_np[index])
            elif index not in done:
                continue
            else:
                rows, lens = rows[:1] if entry.needed == "first" else rows[-1:], (1, 1)
            found.append(_Share(index, entry, rows, *lens, index in done))
        return found


class PooledOutput(StepOutput):
    """A step's rows on the device, and how the host pools them."""

    def __init__(
        self,
        batch: InputBatch,
        requests: Requests,
        pooler: Pooler,
        shares: Sequence[_Share],
        rows: mx.array,
    ) -> None:
        """
        Args:
            batch: the step's inputs.
            requests: of the runner.
            pooler: vLLM's.
            shares: whose rows they are.
            rows: [n, H] float32, of all shares, in their order.
        """
        super().__init__(batch, None, {}, requests)
        self._pooler = pooler
        self._shares = shares
        self._rows = rows

    def get_output(self) -> StepResult:
        """The step's results as vLLM wants them; waits for the device, and pools."""
        result = super().get_output()
        pooled: list[torch.Tensor | None] = [None] * len(self.batch.requests)
        for share, found in zip(self._shares, self._pooled(), strict=True):
            if not share.done:
                continue
            assert found is not None
            if bool(torch.isnan(found).any()):
                result.failures[self.batch.requests[share.index].req_id] = NOT_A_NUMBER
            else:
                pooled[share.index] = found
        result.pooler_output = pooled
        return result

    def _pooled(self) -> Sequence[torch.Tensor | None]:
        rows = torch.from_numpy(np.array(self._rows))
        if not self._shares:
            return ()
        with torch.inference_mode():
            found: Sequence[torch.Tensor | None] = self._pooler(rows, _metadata(self._shares))
        return found


def _metadata(shares: Sequence[_Share]) -> PoolingMetadata:
    """What vLLM's poolers are told of the rows."""
    prompt_lens = [share.prompt_len for share in shares]
    token_ids = None
    if any(share.entry.params.requires_token_ids for share in shares):
        token_ids = torch.zeros((len(shares), max(prompt_lens)), dtype=torch.int64)
        for row, share in zip(token_ids, shares, strict=True):
            known = share.entry.prompt_token_ids or ()
            row[: len(known)] = torch.tensor(known)
    metadata = PoolingMetadata(
        prompt_lens=torch.tensor(prompt_lens),
        prompt_token_ids=token_ids,
        prompt_token_ids_cpu=token_ids,
        pooling_params=[share.entry.params for share in shares],
        pooling_states=[share.entry.states for share in shares],
    )
    metadata.build_pooling_cursor(
        np.array([len(share.rows) for share in shares]),
        torch.tensor([share.seq_len for share in shares]),
        torch.device("cpu"),
    )
    return metadata
