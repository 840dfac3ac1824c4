# SPDX-License-Identifier: Apache-2.0
"""An entry of the table of vLLM's names that we use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_metal.vllm_patches.releases import KNOWN_VLLM

#: vLLM's worker for GPUs, which has the methods that vLLM calls beyond those of the base class.
#: vLLM does not load it for this platform, and importing it takes seconds.
GPU_WORKER = "vllm.v1.worker.gpu_worker"


@dataclass(frozen=True)
class Touched:
    """One name of vLLM's, and what we rely on of it.

    Parameters are names in order, without `self`; a lone `*` stands before keyword-only ones.
    Arguments likewise, with `name=` for those that we pass by keyword.
    """

    name: str  # "module:name", or "module:" for what is read of the module itself
    by: str  # our files that use it, below vllm_metal/
    called: str | None = None  # arguments that we call it with; None: we do not call it
    replaced: str | None = None  # its parameters, if a function of ours replaces it
    fields: str = ""  # attributes, keys or values
    calls: Mapping[str, str] = field(default_factory=dict)  # methods that we call: arguments
    methods: Mapping[str, str] = field(default_factory=dict)  # methods we override: parameters
    releases: tuple[str, ...] = KNOWN_VLLM  # that have it
