# SPDX-License-Identifier: Apache-2.0
"""Has vLLM take what it refuses beside speculation and this plugin honours: min_p, logit_bias."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32",)


def allow_min_p_and_logit_bias() -> None:
    """Lets requests use `min_p` and `logit_bias` where there is speculation.

    vLLM refuses both (`SamplingParams._validate_spec_decode`), because its logits processors for
    them skip the rows of drafts. Our sampler applies every transform of a request to each of its
    rows (`vllm_metal.sample`), so tokens follow the same distribution with and without drafts.
    Whatever else vLLM refuses there stays refused.

    vLLM checks requests where an `InputProcessor` is: in the process that calls `LLM`, and in each
    API server. Each of these makes a configuration first, and thereby calls this function.
    """
    from vllm import SamplingParams

    replace(SamplingParams, "_validate_spec_decode", _without_min_p_and_logit_bias)


def _without_min_p_and_logit_bias(refuse: Callable[..., None]) -> Callable[..., None]:
    def _validate_spec_decode(
        self: SamplingParams, speculative_config: SpeculativeConfig | None
    ) -> None:
        others = copy(self)
        others.min_p, others.logit_bias = 0.0, None
        refuse(others, speculative_config)

    return _validate_spec_decode
