# SPDX-License-Identifier: Apache-2.0
"""Decides how much MLX puts into a command buffer of the GPU; comes before MLX is used.

MLX ends a command buffer after so many dispatches, or once the distinct arrays bound in it hold so
many Mi elements (mlx/backend/metal/device.cpp, 0.32.4). The second counts a KV pool whole, so that
each layer would end two command buffers, at some 20 microseconds each (mlx#4521), and MLX waits for
the device once ten are under way. So the second limit is raised, and the first, with Pace, is what
ends command buffers.
"""

from __future__ import annotations

import os
import sys

#: Dispatches, unless the variable says otherwise: 40 on base and Pro chips, 50 on Max and Ultra.
MOST_DISPATCHES = 50
#: Dispatches of a layer of Llama: seven products, two norms, one write of K and V, which rotates,
#: attention, the gate, two sums.
DISPATCHES_OF_A_LAYER = 14
_DISPATCHES = "MLX_MAX_OPS_PER_BUFFER"
_ELEMENTS = "MLX_MAX_MB_PER_BUFFER"
_RAISED = str(2**20)  # Mi elements: more than any memory holds

_too_late = False


def raise_limit() -> None:
    """Raises the limit on elements, unless its variable is set. Child processes inherit it.

    MLX reads the variable once, when it first uses the GPU: the first array that it makes will do.
    """
    global _too_late
    if _ELEMENTS not in os.environ:
        _too_late = "mlx.core" in sys.modules
        os.environ[_ELEMENTS] = _RAISED


def most_dispatches() -> int:
    """Dispatches of a command buffer in this process, once MLX has read its variable.

    Raises:
        ValueError: the variable is no number above 0.
    """
    text = os.environ.get(_DISPATCHES, "")
    if not text:
        return MOST_DISPATCHES
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{_DISPATCHES}={text}: expected a number above 0")
    return int(text)


def may_be_too_late() -> bool:
    """Whether MLX was imported before the limit was raised, and may have used the GPU."""
    return _too_late
