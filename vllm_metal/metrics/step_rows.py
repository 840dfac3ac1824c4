# SPDX-License-Identifier: Apache-2.0
"""How many rows of a step read prompts, and how many go on with answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class StepRows:
    """Rows by what they are for; each is one token in one forward pass."""

    prefill: int = 0  # of prompts, and of texts computed again after they were preempted
    decode: int = 0  # newest tokens of answers, and drafts to verify

    @staticmethod
    def of(step: SchedulerOutput) -> StepRows:
        """Counts the rows of a step.

        Args:
            step: after its forward was built; rows reserved for drafts that got none are left out.
        """
        cached = step.scheduled_cached_reqs
        outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        left_out = step.num_invalid_spec_tokens or {}
        prefill = decode = 0
        for req_id, rows in step.num_scheduled_tokens.items():
            drafts = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
            if outputs.get(req_id, 0) > 0 and rows == 1 + drafts:
                decode += rows - left_out.get(req_id, 0)
            else:
                prefill += rows
        return StepRows(prefill, decode)

    def __add__(self, other: StepRows) -> StepRows:
        return StepRows(self.prefill + other.prefill, self.decode + other.decode)

    @property
    def prefill_share(self) -> float:
        """Prompts' part of all rows; 0 where there are none."""
        return self.prefill / total if (total := self.prefill + self.decode) else 0.0
