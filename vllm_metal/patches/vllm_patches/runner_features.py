# SPDX-License-Identifier: Apache-2.0
"""Features that vLLM's own model runners lack, and this plugin's worker has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
    # Read against 0.33.0. Remove when a platform may say what its own worker supports.
    from vllm.config import VllmConfig

    replace(VllmConfig, "_get_v1_model_runner_unsupported_features", _without_ours)
    replace(VllmConfig, "_get_v2_model_runner_unsupported_features", _without_ours)


def _without_ours(find: Callable[[VllmConfig], list[str]], self: VllmConfig) -> list[str]:
    return [feature for feature in find(self) if feature not in OURS]
