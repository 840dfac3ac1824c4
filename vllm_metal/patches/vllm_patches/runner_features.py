# SPDX-License-Identifier: Apache-2.0
"""Enables features that this plugin's worker supports, but vLLM's own model runners do not."""

# Remove when a platform may say what its worker supports. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.engine.input_processor import InputProcessor

#: Entries of vLLM's lists of unsupported features. The platform rejects unsupported drafters.
OURS = frozenset(
    {
        "dspark speculative decoding",
        "mixed sliding/full dflash drafts",
        "DFlash candidate-head drafts",
        "speculative method 'suffix'",
    }
)


def allow_supported_features() -> None:
    """Removes OURS from vLLM's lists of features that its model runners (V1 and V2) lack.

    vLLM checks the lists in every process that makes or unpacks a configuration, right after the
    call of the platform that calls this.
    """
    from vllm.config import VllmConfig

    replace(VllmConfig, "_get_v1_model_runner_unsupported_features", _without_ours)
    replace(VllmConfig, "_get_v2_model_runner_unsupported_features", _without_ours)


def check_processors_alike() -> None:
    """Makes vLLM check parameters of users' logits processors by the V1 interface.

    With the V2 model runner, vLLM expects another interface; our sampler runs V1 processors
    (`vllm_metal.engine.sample.custom`). Call it in the processes that have an `InputProcessor`; see
    `speculation.allow_min_p_and_logit_bias`.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    replace(InputProcessor, "_build_logits_processors_params_validator", _v1_validator)


def _v1_validator(
    build: Callable[[InputProcessor], Callable[[SamplingParams], None]], self: InputProcessor
) -> Callable[[SamplingParams], None]:
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    return partial(validate_logits_processors_parameters, self.model_config.logits_processors)


def _without_ours(find: Callable[[VllmConfig], list[str]], self: VllmConfig) -> list[str]:
    return [feature for feature in find(self) if feature not in OURS]
