# SPDX-License-Identifier: Apache-2.0
"""Keeps weights, or weights and KV pool, resident through MLX's wired limit, from macOS 15 on.

macOS evicts what the GPU has not used for about a second; models larger than half of the memory
have then run at a tenth of their speed (osaurus-ai/vmlx-swift#418), so their weights are wired by
default. But wired memory is unavailable to all other programs: Macs have frozen with the whole
working set wired (vmlx-swift#421) and panicked when much wired memory came and went (mlx#3186,
mlx#3346). Weights do neither; hence `LEFT_FREE`. A killed process may leave its memory wired until
a reboot (omlx#2184), so `vllm_metal.patches.vllm_patches.shutdown` waits longer on a Mac.
"""

from __future__ import annotations

import mlx.core as mx
import psutil
from vllm.logger import init_logger

from vllm_metal.device import mlx_device
from vllm_metal.settings.envs import Device

logger = init_logger(__name__)

GIB = 2**30
#: Weights are wired by default if they take more than this share of the memory
LARGE_WEIGHTS = 1 / 2
#: and this share, or this many bytes if that is more, stays free for everything else.
LEFT_FREE_SHARE = 0.35
LEFT_FREE = 8 * GIB
#: Metal allocates smaller arrays in whole pages, and MLX counts the arrays' bytes.
_PAGE = 16384
#: MLX keeps its smallest arrays in one buffer (heap_size_ of its allocator, 1 MiB).
_HEAP = 1 << 20
#: Per layer: quantized values and their scales, for K and V.
MOST_POOL_ARRAYS = 4


class Wiring:
    """Wires a process's weights, or weights and pool, in memory until the process ends."""

    def __init__(
        self,
        kind: Device,
        asked: bool | None,  # the setting `wire_memory`; None: only large weights are wired
        alone: bool,  # no other worker of the server shares the machine
    ) -> None:
        self._can = mlx_device.can_wire(kind)
        self._asked = asked
        self._alone = alone
        self._before: int | None = None  # MLX's limit before; None: nothing is wired by us

    def weights(self, num_arrays: int) -> None:
        """Wires large weights, given as `num_arrays` arrays; call it before a pool exists."""
        if self._asked is None and self._can and self._alone:
            weights = mx.get_active_memory()
            if is_large(psutil.virtual_memory().total, weights):
                self._wire(num_arrays, "weights")

    def everything(self, num_arrays: int) -> None:
        """Wires weights and pool (`num_arrays` arrays), if the setting `wire_memory` is on."""
        if self._asked:
            self._wire(num_arrays, "weights and KV pool")

    def release(self) -> None:
        """Restores MLX's limit, so that the system may evict memory again."""
        if self._before is not None:
            mx.set_wired_limit(self._before)
            self._before = None

    def _wire(self, num_arrays: int, what: str) -> None:
        # MLX wires buffers in any order, also cached ones, as long as the limit has room.
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
                "macOS has wired only %.2f GiB in total, less than the %.2f GiB of %s: the first "
                "step after a pause may be slow",
                wired / GIB,
                held / GIB,
                what,
            )
            return
        hint = ""
        if self._asked is None:
            hint = "; --additional-config '{\"wire_memory\": false}' leaves them to macOS"
        logger.info("%.2f GiB are wired: %s%s", held / GIB, what, hint)


def is_large(memory: int, weights: int) -> bool:
    """Whether weights are wired by default, on a machine with `memory` bytes."""
    left = memory - weights
    return weights > memory * LARGE_WEIGHTS and left >= max(LEFT_FREE, memory * LEFT_FREE_SHARE)
