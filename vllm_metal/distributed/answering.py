# SPDX-License-Identifier: Apache-2.0
"""Which rank's results vLLM reads, and what becomes of the errors of those it does not hear."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)


def answers(parallel: ParallelConfig, rank: int) -> bool:
    """Whether vLLM reads a rank's results: the first tensor rank's of the last pipeline stage.

    Args:
        parallel: of the engine.
        rank: among the engine's.
    """
    return rank == parallel.world_size - parallel.tensor_parallel_size


@contextmanager
def heard(answering: bool) -> Iterator[None]:
    """Ends this process where a step fails on a rank that vLLM does not listen to.

    vLLM logs such an error and asks for the next step. The other ranks would wait for this one's
    part of the sums; they hear of its end at once, as its connections close.
    """
    try:
        yield
    except Exception:
        if answering:
            raise
        logger.exception("A step failed on this rank, which ends the engine")
        os._exit(1)  # what waits for the device would wait for the other ranks
