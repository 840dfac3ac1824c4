# SPDX-License-Identifier: Apache-2.0
"""Stores each worker's share of a machine's memory in vLLM's configuration.

The process that starts the workers sees the memory before they use it; all of them receive the
configuration.
"""

# Remove when vLLM tells its workers how they share a machine's memory. Read against vLLM 0.33.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

_SHARE = "vllm_metal_share"  # attribute of a ParallelConfig, which goes to each worker's process


def give(parallel: ParallelConfig, share: Any) -> None:
    """Stores the share (any picklable object) for each worker started with this configuration."""
    setattr(parallel, _SHARE, share)


def given(parallel: ParallelConfig) -> Any:
    """Returns the share stored by `give`; None if a worker has the machine to itself."""
    return getattr(parallel, _SHARE, None)
