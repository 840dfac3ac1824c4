# SPDX-License-Identifier: Apache-2.0
"""A step's results, with the requests that the step could not serve; changes nothing in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.outputs import ModelRunnerOutput

NOT_A_NUMBER = "the model's logits are not numbers (NaN)"


@dataclass
class StepResult(ModelRunnerOutput):
    """A step's results, and what went wrong. The `scheduler` module has vLLM act on it."""

    failures: dict[str, str] = field(default_factory=dict)  # request id to the reason
    pool_lost: bool = False  # True: the KV pool was made anew, and holds no request's K/V
