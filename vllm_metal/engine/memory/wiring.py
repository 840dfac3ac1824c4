# SPDX-License-Identifier: Apache-2.0
"""Keeps weights, or weights and KV pool, resident: from macOS 15 on, by MLX's wired limit.

macOS lets go of what the GPU has not used for a second or so, and models of more than half of the
memory have then run at a tenth of their speed (osaurus-ai/vmlx-swift#418), so their weights are
wired unasked. But what is wired is taken from all other programs: Macs have frozen with all of the
working set wired (vmlx-swift#421), and panicked where much of it came and went (mlx#3186,
mlx#3346). Weights do neither; hence `LEFT_FREE`. A process that is killed may leave what it had
wired until a reboot (omlx#2184), so
`vllm_metal.patches.vllm_patches.shutdown` waits longer on a Mac.
"""

from __future__ import annotations

import mlx.core as mx
import psutil
from vllm.logger import init_logger

from vllm_metal.device import mlx_device
from vllm_metal.settings.envs import Device

logger = init_logger(__name__)

GIB = 2**30
#: Weights are wired unasked where they take more than this share of the memory,
LARGE_WEIGHTS = 1 / 2
#: and so much of it, or so many bytes if that is more, stays for all else.
LEFT_FREE_SHARE = 0.35
LEFT_FREE = 8 * GIB
#: Metal has smaller arrays in whole pages, and MLX counts their bytes.
_PAGE = 16384
#: MLX keeps the smallest arrays in one buffer (heap_size_ of its allocator, 1 MiB).
_HEAP = 1 << 20
#: Of a layer: quantized values and their scales, of K and of V.
MOST_POOL_ARRAYS = 4


class Wiring:
    """What of a process's memory is wired, from its first pool until it ends."""

    def __init__(self, kind: Device, asked: bool | None, alone: bool) -> None:
        """
        Args:
            kind: of the device.
            asked: the setting `wire_memory`; None: large weights alone are wired.
            alone: whether no other worker of the server shares the machine.
        """
        self._can = mlx_device.can_wire(kind)
        self._asked = asked
        self._alone = alone
        self._before: int | None = None  # MLX's limit; None: nothing is wired by us

    def weights(self, num_arrays: int) -> None:
        """Wires weights where they are large; call it before there is a pool.

        Args:
            num_arrays: arrays that they are.
        """
        if self._asked is None and self._can and self._alone:
            weights = mx.get_active_memory()
            if is_large(psutil.virtual_memory().total, weights):
                self._wire(num_arrays, "weights")

    def everything(self, num_arrays: int) -> None:
        """Wires weights and pool, and what is made in their place, where the setting asks for it.

        Args:
            num_arrays: arrays that they are.
        """
        if self._asked:
            self._wire(num_arrays, "weights and KV pool")

    def release(self) -> None:
        """Lets the system move memory again, as before."""
        if self._before is not None:
            mx.set_wired_limit(self._before)
            self._before = None

    def _wire(self, num_arrays: int, what: str) -> None:
        """MLX wires its buffers in no order, spare ones too, as long as the limit has room."""
        mx.clear_cache()
        held = mx.get_active_memory()
        try:
            before = mx.set_wired_limit(held + num_arrays * _PAGE + _HEAP)
        except (ValueError, RuntimeError) as error:  # more than iogpu.wired_limit_mb
            if self._asked:
                raise
            logger.warning("The weights are not wired into memory: %s", error)
            return
        if self._before is None:
            self._before = before
        wired = getattr(psutil.virtual_memory(), "wired", None)
        if wired is not None and wired < held:
            logger.warning(
                "macOS has %.2f GiB wired in all, less than the %.2f GiB of %s: after a pause the "
                "first step may be slow",
                wired / GIB,
                held / GIB,
                what,
            )
            return
        way_out = ""
        if self._asked is None:
            way_out = "; --additional-config '{\"wire_memory\": false}' leaves them to macOS"
        logger.info("%.2f GiB are wired: %s%s", held / GIB, what, way_out)


def is_large(memory: int, weights: int) -> bool:
    """Whether weights are wired unasked.

    Args:
        memory: bytes of the machine.
        weights: bytes.
    """
    left = memory - weights
    return weights > memory * LARGE_WEIGHTS and left >= max(LEFT_FREE, memory * LEFT_FREE_SHARE)
