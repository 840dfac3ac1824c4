# SPDX-License-Identifier: Apache-2.0
"""DeepStack: adds outputs of a tower's middle layers to image tokens in the first text layers.

Meng et al. 2024, arXiv:2406.04334; as in Qwen3-VL (`_deepstack_process` of transformers).
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.attention.forward_inputs import optional_of_rows
from vllm_metal.patches.mlx_patches.module_calls import follow_call

#: Key of the added values, [T, levels, H], in a step's extras; zeros for text tokens.
DEEPSTACK = "deepstack"


def put_in(model: nn.Module, levels: int) -> None:
    """Makes the first `levels` text layers add a step's DeepStack outputs (extra DEEPSTACK)."""
    for level, layer in enumerate(model.layers[:levels]):
        follow_call(layer, partial(_add_level, level))


def _add_level(level: int, hidden_states: mx.array) -> mx.array:
    added = optional_of_rows(DEEPSTACK)
    return hidden_states if added is None else hidden_states + added[..., level, :]
