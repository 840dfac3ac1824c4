# SPDX-License-Identifier: Apache-2.0
"""Speculative methods that vLLM ties to a package or a device, or no longer has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm_metal.vllm_patches.releases import TESTED_VLLM, installed_vllm
from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

#: The vLLM releases that need these changes.
RELEASES = ("0.32", "0.33")


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


def refuse_missing_methods(methods: Sequence[str]) -> None:
    """Refuses by name the methods that vLLM no longer has: `medusa`, `mlp_speculator` since 0.33.

    Without this, vLLM's own error would list its methods, some of which this plugin does not serve.

    Args:
        methods: those that this plugin serves.
    """
    from vllm.config.speculative import SpeculativeMethod
    from vllm.engine.arg_utils import EngineArgs

    missing = set(methods) - set(get_args(SpeculativeMethod))

    def make(create: Callable[..., SpeculativeConfig | None]) -> Callable[..., Any]:
        def create_speculative_config(
            self: EngineArgs,
            target_model_config: ModelConfig,
            target_parallel_config: ParallelConfig,
        ) -> SpeculativeConfig | None:
            method = self.spec_method or (self.speculative_config or {}).get("method")
            if method in missing:
                raise ValueError(
                    f"--speculative-config method {method!r} is not known to vLLM "
                    f"{installed_vllm()} any more: install vLLM {TESTED_VLLM}, or choose one of "
                    f"{', '.join(name for name in methods if name not in missing)}"
                )
            return create(self, target_model_config, target_parallel_config)

        return create_speculative_config

    if missing:
        replace(EngineArgs, "create_speculative_config", make)
