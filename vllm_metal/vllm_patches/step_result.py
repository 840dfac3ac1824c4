# SPDX-License-Identifier: Apache-2.0
"""What a step's results say of the requests it could not serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.outputs import ModelRunnerOutput

NOT_A_NUMBER = "the model's logits are not numbers (NaN)"


@dataclass
class StepResult(ModelRunnerOutput):
    """A step's results, and what went wrong."""

    failures: dict[str, str] = field(default_factory=dict)  # request id to the reason
    pool_lost: bool = False  # no block holds what the scheduler thinks it does
