# SPDX-License-Identifier: Apache-2.0
"""One line of the table of touched names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_metal.vllm_patches.releases import KNOWN_VLLM

#: vLLM's worker for GPUs: says what is asked of a worker beyond the base class. vLLM does not load
#: it for this platform, and importing it takes seconds.
GPU_WORKER = "vllm.v1.worker.gpu_worker"


@dataclass(frozen=True)
class Touched:
    """One name of vLLM's, and what of it is relied on.

    Parameters are names in order, without `self`; a lone `*` goes before those that are passed by
    keyword only. Arguments are the same, `name=` for those we pass by keyword.
    """

    name: str  # "module:name", or "module:" for what is read of the module itself
    by: str  # our files that touch it, below vllm_metal/
    called: str | None = None  # arguments that we call it with; None: we do not
    replaced: str | None = None  # its parameters, where a function of ours takes its place
    fields: str = ""  # attributes, keys or values
    calls: Mapping[str, str] = field(default_factory=dict)  # methods of its that we call: arguments
    methods: Mapping[str, str] = field(default_factory=dict)  # that ours replace: parameters
    releases: tuple[str, ...] = KNOWN_VLLM  # that have it
