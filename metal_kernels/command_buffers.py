# SPDX-License-Identifier: Apache-2.0
"""Sets how much work MLX puts into a GPU command buffer; import before MLX is used."""

from __future__ import annotations

import os
import sys

# MLX ends a command buffer after a number of dispatches, or once the distinct arrays bound in it
# hold a number of Mi elements (mlx/backend/metal/device.cpp, 0.32.4). The second limit counts a
# whole KV pool, so each layer would end two command buffers, at some 20 microseconds each
# (mlx#4521), and MLX waits for the device once ten are pending. So the second limit is raised; the
# first one and Pace end command buffers.

#: Largest default number of MLX's dispatches: 40 on base and Pro chips, 50 on Max and Ultra.
MOST_DISPATCHES = 50
#: Dispatches of a Llama layer: seven products, two norms, one write of K and V with rotation,
#: attention, the gate, two sums.
DISPATCHES_OF_A_LAYER = 14
_DISPATCHES = "MLX_MAX_OPS_PER_BUFFER"
_ELEMENTS = "MLX_MAX_MB_PER_BUFFER"
_RAISED = str(2**20)  # Mi elements, more than any memory holds

_too_late = False


def raise_limit() -> None:
    """Raises MLX's limit of elements per command buffer by its variable, unless that is set."""
    # MLX reads the variable once, when it first uses the GPU, for example for the first array.
    global _too_late
    if _ELEMENTS not in os.environ:
        _too_late = "mlx.core" in sys.modules
        os.environ[_ELEMENTS] = _RAISED


def most_dispatches() -> int:
    """Returns the dispatches per command buffer in this process, as MLX reads its variable.

    Raises ValueError: the variable is not a positive number.
    """
    text = os.environ.get(_DISPATCHES, "")
    if not text:
        return MOST_DISPATCHES
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{_DISPATCHES}={text}: expected a number above 0")
    return int(text)


def may_be_too_late() -> bool:
    """Returns whether MLX may have used the GPU before the limit of command buffers was raised."""
    return _too_late
