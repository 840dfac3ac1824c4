# SPDX-License-Identifier: Apache-2.0
"""What kernels may take by the proxy: registers, waits, bytes in flight, issue slots a key.

By the proxy, up to 90 registers fit Apple's GPUs, and 115 or more spill: docs/kernel-checks.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from metal_interpreter import proxy
from metal_interpreter.proxy import SLOW_SUM, Call, Figures

#: Keys of a round of the main loop for one simdgroup, by kernel and template arguments. Where
#: simdgroups share a head, or have a key's other rows, each has its share of a key.
KEYS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "decode": lambda template: (
        8 * template["STRIPS"] / (template["SPLIT"] * template["ROW_GROUPS"])
    ),
    "recurrence": lambda template: 1,  # a token
    "few_rows": lambda template: 4,  # in which the tests plant faults
}


@dataclass(frozen=True)
class Budget:
    """Bounds of figures; None: there is none."""

    loop_registers: int
    registers: int
    scratch: int = 0  # bytes a thread
    waits: int | None = None  # of a round, one after the other
    in_flight: int | None = None  # bytes of a threadgroup, at least
    slots: float | None = None  # of a key, a `simd_sum` counted by SLOW_SUM

    def exceeded(self, figures: Figures, keys: float | None, bits: int) -> list[str]:
        """What is beyond a bound, in words.

        Args:
            figures: of a call.
            keys: of a round, see KEYS; None: its slots are bounded by nothing.
            bits: of the pool's elements. Of 8, K and V together are in flight.
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


#: Of decode for 1 to 8 packed rows, by bits of the pool's elements; and what a key's slots may be,
#: by size and bits, which memory leaves at 8.5 bytes a cycle and core: docs/kernel-checks.md.
_SLOTS = {("64", 16): 45.0, ("128", 16): 95.0, ("256", 16): 185.0, ("128", 8): 130.0}
_IN_FLIGHT = 8192
#: But 192 elements of 8 bits are three simdgroups' share, and 256 threads have room for two such
#: walks alone. Threadgroups of 192 threads with fewer registers than 90 run three a core, which
#: together ask for more than two of 256 threads do.
_LESS_IN_FLIGHT = {("192", 8): 7680, ("192/128", 8): 7680}
#: Kernels that are held to `decode_budget`; others to the table alone.
HELD: tuple[str, ...] = ("decode",)


measured = cache(proxy.measure)


def decode_budget(size: str, bits: int, rows: int = 8) -> Budget:
    """The budget of a decode kernel, whatever the model; slots are bounded for tiles of 8 rows."""
    return Budget(
        90,
        104,
        waits=3,
        in_flight=_LESS_IN_FLIGHT.get((size, bits), _IN_FLIGHT),
        slots=_SLOTS.get((size, bits)) if rows == 8 else None,
    )


def keys_of(call: Call) -> float | None:
    """Keys of a round of a call's main loop, see KEYS."""
    keys = KEYS.get(call.kernel)
    return None if keys is None else keys(call.template)
