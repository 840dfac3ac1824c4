# SPDX-License-Identifier: Apache-2.0
"""Defines SamplingStage: one sampling parameter, or a few that belong together.

To add a sampling parameter, write a stage in a new module and add it at its position to the list in
`sampler.stages`. The sampler and the memory profile need nothing else.
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

#: Temperatures below this are greedy; the threshold vLLM documents for `temperature`.
GREEDY_EPSILON = 1e-5


def is_random(params: SamplingParams) -> bool:
    """Returns whether a request draws its tokens at random, instead of taking the most likely."""
    return params.temperature >= GREEDY_EPSILON


class RequestParameters(Protocol):
    """Stores the sampling parameters that one part of the sampler reads, by req_idx.

    Every implementation reads its own fields of `SamplingParams` and owns their storage: a numpy
    column of max_num_reqs entries, which a step reads with one fancy index (`Step.column`), or a
    dict for rare parameters.
    """

    def add_request(
        self,
        req_idx: int,
        params: SamplingParams,
        prompt: Sequence[int],
        output: list[int],
    ) -> bool:
        """Stores a request's parameters at an empty req_idx; returns whether it uses this feature.

        output: tokens that a resumed request has generated; else empty.
        """
        ...

    def remove_request(self, req_idx: int) -> None:
        """Frees a req_idx; no-op if it is free or does not use this part."""
        ...

    def heaviest(self) -> dict[str, Any]:
        """Returns the `SamplingParams` arguments that need the most memory; {} if all are small."""
        # The memory profile samples with those of all stages together.
        return {}


class SamplingStage(RequestParameters, Protocol):
    """Changes the logits in steps where some row's request uses it."""

    #: The stage never changes the most likely token. The sampler then offers it random requests
    #: only, so it does not run in a step whose requests are all greedy. Greedy rows beside random
    #: ones must keep their logits: entries of a column that no request has set are neutral.
    keeps_argmax: ClassVar[bool] = False

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        """Maps float32 [N, V] -> float32 [N, V], lazily; leaves rows alone that do not use it."""
        ...

    def record(self, token_ids: mx.array, step: Step, accepted: mx.array | None) -> None:
        """Updates the stage's device state with the tokens just sampled.

        token_ids: int32 [N], not to be read on the host. accepted: int32 [R], accepted drafts of
        each span; None without draft_spans. A span outputs only the rows up to and including the
        one after its last accepted draft (`DraftSpans.is_output`).
        """
        return


@dataclass(frozen=True)
class Step:
    """The rows of one step (at least one), created for each step and never changed."""

    req_indices: np.ndarray  # int32 [N], the req_idx of each logits row
    num_output_tokens: np.ndarray  # int32 [N], tokens generated before this one; too high by `lag`
    draft_spans: DraftSpans | None  # None: every row is its own request
    used_np: np.ndarray  # uint32 [N], bits of the parts that each row's request uses
    bit_of: Mapping[RequestParameters, int]  # owned by `RequestBits`
    lag: PositionLag | None = None  # lag of each row; None: the host knows all counts

    @cached_property
    def _used_by_any(self) -> int:
        return int(np.bitwise_or.reduce(self.used_np))

    def uses(self, part: RequestParameters) -> bool:
        """Returns whether some row's request uses `part`, usually a stage."""
        return bool(self._used_by_any & self.bit_of[part])

    def mask_using(self, part: RequestParameters) -> np.ndarray:
        """Returns bool [N], the rows whose request uses `part`."""
        return (self.used_np & np.uint32(self.bit_of[part])) != 0

    def rows_using(self, part: RequestParameters) -> np.ndarray:
        """Returns int32 indices (ascending) of the rows whose request uses `part`."""
        return np.flatnonzero(self.mask_using(part)).astype(np.int32)

    def column(self, by_req_idx: np.ndarray) -> np.ndarray:
        """Returns [N, 1] values of a [max_num_reqs] parameter, to broadcast against logits."""
        return by_req_idx[self.req_indices][:, None]


class RequestBits:
    """Records which sampler parts each request uses: one bit per part, at most 32 parts.

    One OR over the bits yields the parts that a step uses, so the Python work of a step does not
    grow with the number of requests.
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
