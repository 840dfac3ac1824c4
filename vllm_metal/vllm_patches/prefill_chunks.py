# SPDX-License-Identifier: Apache-2.0
"""Chunks of prompts that end within a block, for models whose layers keep a recurrent state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_metal.vllm_patches.replacing import replace

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32",)


def end_chunks_within_blocks() -> None:
    """Has vLLM's schedulers prefill part of a block where there is no room for all of it.

    vLLM ends chunks at the ends of blocks, whose states it keeps. Where a step's tokens hold a
    block, but not a block and the tokens of all that decode, it gives the prompt no token at all,
    for as long as the others decode. A request's block holds the state at its newest token,
    wherever that is, so a chunk may end there.
    """
    replace(Scheduler, "_mamba_block_aligned_split", _never_empty)


def _never_empty(split: Callable[..., int]) -> Callable[..., int]:
    def split_chunk(
        self: Any,
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        found = (num_new_local_computed_tokens, num_external_computed_tokens)
        chunk = split(self, request, num_new_tokens, *found)
        if chunk > 0 or num_new_tokens <= 0:
            return chunk
        block_size = int(self.cache_config.block_size)
        start = request.num_computed_tokens + sum(found)
        return min(num_new_tokens, block_size - start % block_size)

    return split_chunk
