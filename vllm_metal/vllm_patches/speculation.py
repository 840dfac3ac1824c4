# SPDX-License-Identifier: Apache-2.0
"""Speculative methods that vLLM ties to a package or a device, or no longer has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

#: The vLLM releases that need these changes.
RELEASES = ("0.32",)


def allow_lookup_methods() -> None:
    """Lets vLLM take `ngram` and `suffix` as this plugin serves them.

    vLLM schedules ahead with `ngram_gpu` but not with `ngram`, which are the same here, and asks
    for the package arctic-inference with `suffix`, which this plugin does not use. Only the process
    that reads the options calls this; for the engine's see `schedule_ahead_with_ngram`.
    """
    import vllm.config.speculative as speculative
    import vllm.config.vllm as config

    config.NgramGPUTypes = Literal["ngram", "ngram_gpu"]
    speculative.has_arctic_inference = lambda: True


def schedule_ahead_with_ngram(speculative_config: SpeculativeConfig | None) -> None:
    """Turns `ngram` into `ngram_gpu` in the configuration that goes to the engine's process.

    That process checks again whether vLLM schedules ahead with the method, with vLLM's own list.
    """
    if speculative_config is not None and speculative_config.method == "ngram":
        speculative_config.method = "ngram_gpu"
