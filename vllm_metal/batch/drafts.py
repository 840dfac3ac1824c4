# SPDX-License-Identifier: Apache-2.0
"""Drafts on their way from a proposer to the rows that verify them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class StepDrafts:
    """What a step verifies, by its R requests in order."""

    token_ids: mx.array  # int32 [R, K]; past a request's count arbitrary
    counts_np: np.ndarray  # int32 [R], drafts of each, at most what is reserved
    reserved_np: np.ndarray  # int32 [R], rows the scheduler set aside for drafts
