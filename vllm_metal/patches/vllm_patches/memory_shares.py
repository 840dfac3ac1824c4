# SPDX-License-Identifier: Apache-2.0
"""Notes in vLLM's configuration which share of a machine's memory each of its workers has.

Who starts them sees the memory before any of them is there. The configuration goes to them all.
"""

# Remove when vLLM tells its workers how they share a machine's memory. Read against vLLM 0.33.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

_SHARE = "vllm_metal_share"  # of a ParallelConfig, which goes to each worker's process


def give(parallel: ParallelConfig, share: Any) -> None:
    """Notes the share that each worker has which is started with this configuration.

    Args:
        parallel: of the process that starts them.
        share: any object that can be pickled.
    """
    setattr(parallel, _SHARE, share)


def given(parallel: ParallelConfig) -> Any:
    """What `give` noted; None: nothing, as a worker has the machine for itself."""
    return getattr(parallel, _SHARE, None)
