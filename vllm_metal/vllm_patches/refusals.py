# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters that vLLM refuses beside speculation, and this plugin honours."""

from __future__ import annotations

import functools
from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")


def allow_min_p_and_logit_bias() -> None:
    """Lets requests with `min_p` or `logit_bias` through where there is speculation.

    vLLM 0.32 refuses them (`SamplingParams._validate_spec_decode`; so does 0.33), since it leaves
    drafted rows out of its logits processors for the two. Here every drafted row passes through all
    transforms of its request (`vllm_metal.sample`), so what is sampled follows the same law as
    without drafts. Anything else that vLLM refuses there stays refused.

    Requests are looked at where an `InputProcessor` is: in the process that calls `LLM`, and in
    each API server. All of them make a configuration of their own before that, and so come here.
    """
    from vllm import SamplingParams

    refuse = SamplingParams._validate_spec_decode
    if hasattr(refuse, "__wrapped__"):
        return

    @functools.wraps(refuse)
    def _validate_spec_decode(
        self: SamplingParams, speculative_config: SpeculativeConfig | None
    ) -> None:
        others = copy(self)
        others.min_p, others.logit_bias = 0.0, None
        refuse(others, speculative_config)

    SamplingParams._validate_spec_decode = _validate_spec_decode  # type: ignore[method-assign]
