# SPDX-License-Identifier: Apache-2.0
"""Runs the largest step an encoder may get, once, to measure its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.pooling.encoders.executor import EncoderExecutor

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def profile_step(executor: EncoderExecutor, config: VllmConfig) -> None:
    """Runs max_num_batched_tokens rows of the longest texts, whose scores take the most memory."""
    scheduler, longest = config.scheduler_config, config.model_config.max_model_len
    lengths = largest_lengths(scheduler.max_num_batched_tokens, longest, scheduler.max_num_seqs)
    mx.eval(executor.forward_hidden(rows_of(lengths), None))


def largest_lengths(rows: int, longest: int, texts: int) -> list[int]:
    """Returns text lengths of the largest step: at most `rows` rows and `texts` texts.

    longest: maximum tokens of a text.
    """
    whole, rest = divmod(rows, longest)
    return ([longest] * whole + [rest] * (rest > 0))[:texts]


def rows_of(lengths: list[int], token_ids: np.ndarray | None = None) -> Rows:
    """Returns a batch of whole texts.

    lengths: [R] tokens of each text, at least 1. token_ids: [T] int32; None: id 0 for all.
    """
    lengths_np = np.array(lengths, np.int32)
    ends_np = np.cumsum(lengths_np)
    positions_np = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    if token_ids is None:
        token_ids = np.zeros(len(positions_np), np.int32)
    return Rows(
        req_indices_np=np.arange(len(lengths), dtype=np.int32),
        query_start_loc_np=np.concatenate([[0], ends_np]).astype(np.int32),
        seq_lens_np=lengths_np,
        positions_np=positions_np,
        positions=mx.array(positions_np),
        input_ids=mx.array(token_ids),
        logits_indices=None,
    )
