# SPDX-License-Identifier: Apache-2.0
"""Features that vLLM's own model runners lack, and this plugin's worker has."""

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

#: Entries of either list, as vLLM words them. The platform decides which drafters are served.
OURS = frozenset(
    {
        "dspark speculative decoding",
        "mixed sliding/full dflash drafts",
        "DFlash candidate-head drafts",
        "speculative method 'suffix'",
    }
)


def take_out_ours() -> None:
    """Lets configurations use the features of OURS with either of vLLM's runner contracts.

    vLLM checks its lists in every process that makes or unpacks a configuration, right after it
    asked the platform, which calls this.
    """
    from vllm.config import VllmConfig

    replace(VllmConfig, "_get_v1_model_runner_unsupported_features", _without_ours)
    replace(VllmConfig, "_get_v2_model_runner_unsupported_features", _without_ours)


def check_processors_alike() -> None:
    """Makes vLLM check parameters of users' logits processors alike with both contracts.

    With the second one, it asks for processors of another interface. The sampler runs those of the
    first (`vllm_metal.engine.sample.custom`). vLLM checks requests where an `InputProcessor` is;
    see `speculation.allow_min_p_and_logit_bias`.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    replace(InputProcessor, "_build_logits_processors_params_validator", _of_the_first)


def _of_the_first(
    build: Callable[[InputProcessor], Callable[[SamplingParams], None]], self: InputProcessor
) -> Callable[[SamplingParams], None]:
    from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

    return partial(validate_logits_processors_parameters, self.model_config.logits_processors)


def _without_ours(find: Callable[[VllmConfig], list[str]], self: VllmConfig) -> list[str]:
    return [feature for feature in find(self) if feature not in OURS]
