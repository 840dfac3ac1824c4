# SPDX-License-Identifier: Apache-2.0
"""SamplingStage: one sampling parameter, or a few that belong together, and all that serves it.

To add a sampling parameter, write a stage in a module of its own and add it, in its place, to the
list in `sampler.stages`. The sampler and the memory profile need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from metal_kernels.layout import PositionLag
from vllm_metal.engine.sample.draft_spans import DraftSpans

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy; the threshold vLLM documents for `temperature`."""


def is_random(params: SamplingParams) -> bool:
    """Whether a request's tokens are drawn; a greedy request takes the most likely token."""
    return params.temperature >= GREEDY_EPSILON


class RequestParameters(Protocol):
    """Keeps, by req_idx, what requests ask of one part of the sampler.

    Every implementation reads its own fields of `SamplingParams` and owns their storage: a numpy
    column of max_num_reqs entries, which a step reads with one fancy index (`Step.column`), or a
    dict for what few requests have.
    """

    def add_request(
        self,
        req_idx: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: list[int],
    ) -> bool:
        """Stores what a request asks for and returns whether it asks for anything.

        output: tokens that a resumed request has generated; else empty. `req_idx` is empty before.
        """
        ...

    def remove_request(self, req_idx: int) -> None:
        """Empties a req_idx, which may have asked for nothing or be empty already."""
        ...

    def heaviest(self) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams` that need the most memory of any request; the
        memory profile samples with those of all stages together. {} if none of that matters."""
        return {}


class SamplingStage(RequestParameters, Protocol):
    """One change of the logits. The sampler runs it in steps where some row's request asks for it.

    keeps_argmax: the stage never changes which token is the most likely. The sampler then offers it
    random requests only, so it does not run in a step whose requests are all greedy. Greedy rows
    beside random ones must keep their logits: entries of a column that no request has set are
    neutral.
    """

    keeps_argmax: ClassVar[bool] = False

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        """float32 [N, V] -> float32 [N, V], lazy. Rows that do not ask for it stay as they are."""
        ...

    def record(self, token_ids: mx.array, step: Step, accepted: mx.array | None) -> None:
        """Updates device state, if the stage keeps any, with the tokens just sampled.

        token_ids: int32 [N], not to be read on the host. accepted: int32 [R], how many drafts of
        each span are accepted; None without draft_spans. Of a span only the rows up to and
        including that after the last accepted draft are output (`DraftSpans.kept`).
        """
        return


@dataclass(frozen=True)
class Step:
    """The rows of one step (at least one), made fresh each step and never changed.

    req_indices: int32 [N], the req_idx of each logits row.
    num_output_tokens: int32 [N], tokens generated before this one; by `behind` too many.
    draft_spans: of drafts to verify; None where every row is a request of its own.
    used_np: uint32 [N], bits of what each row's request asks for.
    bit_of: which bit stands for which part of the sampler; owned by `RequestBits`.
    behind: of each row; None where the host knows how many tokens were generated.
    """

    req_indices: np.ndarray
    num_output_tokens: np.ndarray
    draft_spans: DraftSpans | None
    used_np: np.ndarray
    bit_of: Mapping[RequestParameters, int]
    lag: PositionLag | None = None

    @cached_property
    def _used_by_any(self) -> int:
        return int(np.bitwise_or.reduce(self.used_np))

    def uses(self, part: RequestParameters) -> bool:
        """Whether some row's request asks for `part`, a stage as a rule."""
        return bool(self._used_by_any & self.bit_of[part])

    def mask_using(self, part: RequestParameters) -> np.ndarray:
        """bool [N], the rows whose request asks for `part`."""
        return (self.used_np & np.uint32(self.bit_of[part])) != 0

    def rows_using(self, part: RequestParameters) -> np.ndarray:
        """Indices (int32, ascending) of the rows whose request asks for `part`."""
        return np.flatnonzero(self.mask_using(part)).astype(np.int32)

    def column(self, by_req_idx: np.ndarray) -> np.ndarray:
        """One parameter of every row, [N, 1], ready to broadcast against logits.

        by_req_idx: [max_num_reqs], any dtype.
        """
        return by_req_idx[self.req_indices][:, None]


class RequestBits:
    """Which request asks for which parts of the sampler: a bit for each part, by its position.

    A step learns what any of its rows asks for from one OR over the bits, so the Python work of a
    step does not grow with the number of requests. There are at most 32 parts.
    """

    def __init__(self, parts: Sequence[RequestParameters], max_num_reqs: int) -> None:
        self._bit_of = {part: 1 << position for position, part in enumerate(parts)}
        self._used = np.zeros(max_num_reqs, dtype=np.uint32)

    def set_request(self, req_idx: int, used: Iterable[RequestParameters]) -> None:
        self._used[req_idx] = sum(self._bit_of[part] for part in used)

    def step(
        self,
        req_indices: np.ndarray,
        num_output_tokens: np.ndarray,
        draft_spans: DraftSpans | None,
        lag: PositionLag | None = None,
    ) -> Step:
        used = self._used[req_indices]
        return Step(req_indices, num_output_tokens, draft_spans, used, self._bit_of, lag)
