# SPDX-License-Identifier: Apache-2.0
"""Speculative methods that vLLM ties to packages or devices, or has given up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from vllm_metal.vllm_patches.releases import TESTED_VLLM, installed_vllm

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")


def allow_lookup_methods() -> None:
    """Lets vLLM take `ngram` and `suffix` as this plugin does them.

    vLLM plans ahead with `ngram_gpu` but not with `ngram`, which are one here, and wants
    arctic-inference for `suffix`, where ours needs no package. Only the process that reads the
    options comes here, see MetalPlatform.check_and_update_config.
    """
    import vllm.config.speculative as speculative
    import vllm.config.vllm as config

    config.NgramGPUTypes = Literal["ngram", "ngram_gpu"]
    speculative.has_arctic_inference = lambda: True


def refuse_missing_methods(methods: Sequence[str]) -> None:
    """Refuses by name what vLLM has given up: `medusa` and `mlp_speculator`, since 0.33.

    Without this vLLM lists the methods it knows, some of which this plugin does not serve.

    Args:
        methods: that this plugin serves.
    """
    from vllm.config.speculative import SpeculativeMethod
    from vllm.engine.arg_utils import EngineArgs

    missing = set(methods) - set(get_args(SpeculativeMethod))
    create = EngineArgs.create_speculative_config
    if not missing or hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_speculative_config(
        self: EngineArgs,
        target_model_config: ModelConfig,
        target_parallel_config: ParallelConfig,
    ) -> SpeculativeConfig | None:
        method = self.spec_method or (self.speculative_config or {}).get("method")
        if method in missing:
            raise ValueError(
                f"--speculative-config method {method!r} is not known to vLLM {installed_vllm()} "
                f"any more: install vLLM {TESTED_VLLM}, or choose one of "
                f"{', '.join(name for name in methods if name not in missing)}"
            )
        return create(self, target_model_config, target_parallel_config)

    EngineArgs.create_speculative_config = create_speculative_config  # type: ignore[method-assign]
