# SPDX-License-Identifier: Apache-2.0
"""DeepStack: what a tower's middle layers saw is added to rows of images in the first layers.

Meng et al. 2024, arXiv:2406.04334; as Qwen3-VL has it (`_deepstack_process` of transformers).
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.attention.forward_inputs import optional_of_rows
from vllm_metal.patches.mlx_patches.module_calls import follow_call

#: Name of what is added, [T, levels, H], among a step's extras; zeros for rows of text.
DEEPSTACK = "deepstack"


def put_in(model: nn.Module, levels: int) -> None:
    """Has the first layers of a text model add a step's DEEPSTACK to what they return.

    Args:
        model: mlx-lm's.
        levels: how many layers, one for each level of the tower.
    """
    for level, layer in enumerate(model.layers[:levels]):
        follow_call(layer, partial(_added, level))


def _added(level: int, hidden_states: mx.array) -> mx.array:
    added = optional_of_rows(DEEPSTACK)
    return hidden_states if added is None else hidden_states + added[..., level, :]
