# SPDX-License-Identifier: Apache-2.0
"""Notes each worker's share of a machine's memory in vLLM's configuration.

The process that starts the workers sees the memory before they use it, and they all get the
configuration.
"""

# Remove when vLLM tells its workers how they share a machine's memory. Read against vLLM 0.33.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

_SHARE = "vllm_metal_share"  # of a ParallelConfig, which goes to each worker's process


def give(parallel: ParallelConfig, share: Any) -> None:
    """Notes the share (any picklable object) of each worker started with this configuration."""
    setattr(parallel, _SHARE, share)


def given(parallel: ParallelConfig) -> Any:
    """Returns what `give` noted, or None if a worker has the machine to itself."""
    return getattr(parallel, _SHARE, None)
