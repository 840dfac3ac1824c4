# SPDX-License-Identifier: Apache-2.0
"""Limits of kernels' cost in the proxy: registers, waits, bytes in flight, issue slots per key.

In the proxy, up to 90 registers fit Apple's GPUs, and 115 or more spill: docs/kernel-checks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from metal_interpreter import proxy
from metal_interpreter.proxy import SLOW_SUM, Call, Figures

#: Keys per round of a simdgroup's main loop, by kernel and template arguments. If simdgroups
#: share a head or a key's rows, each has its share of a key.
KEYS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "decode": lambda template: (
        8 * template["STRIPS"] / (template["SPLIT"] * template["ROW_GROUPS"])
    ),
    "recurrence": lambda template: 1,  # a token
    "few_rows": lambda template: 4,  # the kernel in which tests plant faults
}


@dataclass(frozen=True)
class Budget:
    """Limits of costs; None: no limit."""

    loop_registers: int
    registers: int
    scratch: int = 0  # bytes per thread
    waits: int | None = None  # sequential waits per round
    in_flight: int | None = None  # minimum bytes per threadgroup
    slots: float | None = None  # per key, with SLOW_SUM per `simd_sum`

    def exceeded(self, figures: Figures, keys: float | None, bits: int) -> list[str]:
        """Returns descriptions of the exceeded limits.

        Args:
            figures: costs of a call.
            keys: keys per round, see KEYS; None: slots are unlimited.
            bits: bits of the pool's elements. With 8, K and V are both in flight.
        """
        bounds = [
            ("registers in the loop", figures.loop_registers, self.loop_registers),
            ("registers", figures.registers, self.registers),
            ("bytes of scratch", figures.scratch, self.scratch),
            ("waits", len(figures.batches), self.waits),
            ("slots a key", None if keys is None else figures.slots(SLOW_SUM) / keys, self.slots),
        ]
        found = [
            f"{what}: {value:g} of {bound:g}"
            for what, value, bound in bounds
            if value is not None and bound is not None and value > bound
        ]
        flying = figures.in_flight if bits == 16 else figures.loaded
        if self.in_flight is not None and flying < self.in_flight:
            found.append(f"bytes in flight: {flying} of {self.in_flight}")
        return found


#: Limits for decode with 1 to 8 packed rows by bits of the pool's elements; and slots per key,
#: by size and bits, as memory allows at 8.5 bytes per cycle and core: docs/kernel-checks.md.
_SLOTS = {("64", 16): 45.0, ("128", 16): 95.0, ("256", 16): 185.0, ("128", 8): 130.0}
_IN_FLIGHT = 8192
#: Exception: 192 elements of 8 bits take three simdgroups, and 256 threads only fit two such
#: walks. Threadgroups of 192 threads with fewer than 90 registers run three per core, which
#: together load more than two of 256 threads do.
_LESS_IN_FLIGHT = {("192", 8): 7680, ("192/128", 8): 7680}
#: Kernels with the limits of `decode_budget`; others only have the table's.
HELD: tuple[str, ...] = ("decode",)


measured = cache(proxy.measure)


def decode_budget(size: str, bits: int, rows: int = 8) -> Budget:
    """Returns the limits of a decode kernel for any model; slots only count for tiles of 8 rows."""
    return Budget(
        90,
        104,
        waits=3,
        in_flight=_LESS_IN_FLIGHT.get((size, bits), _IN_FLIGHT),
        slots=_SLOTS.get((size, bits)) if rows == 8 else None,
    )


def keys_of(call: Call) -> float | None:
    """Returns the keys per round of a call's main loop, see KEYS."""
    keys = KEYS.get(call.kernel)
    return None if keys is None else keys(call.template)
