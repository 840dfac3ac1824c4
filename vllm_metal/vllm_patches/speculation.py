# SPDX-License-Identifier: Apache-2.0
"""Speculative methods that vLLM ties to packages or devices this plugin does without."""

from __future__ import annotations

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")


def allow_lookup_methods() -> None:
    """Lets vLLM take `ngram` and `suffix` as this plugin does them.

    vLLM plans ahead with `ngram_gpu` but not with `ngram`, which are one here, and wants
    arctic-inference for `suffix`, where ours needs no package. Only the process that reads the
    options comes here, see MetalPlatform.check_and_update_config.
    """
    from typing import Literal

    import vllm.config.speculative as speculative
    import vllm.config.vllm as config

    config.NgramGPUTypes = Literal["ngram", "ngram_gpu"]
    speculative.has_arctic_inference = lambda: True
