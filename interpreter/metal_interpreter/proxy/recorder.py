# SPDX-License-Identifier: Apache-2.0
"""Records the kernel calls of operations, to measure them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..unrun import Call, UnrunKernel, unrun


@dataclass(frozen=True, eq=False)
class Recorder:
    """Makes kernels that record their calls and return zeros without running."""

    #: Each once, in the order of the first call of it.
    calls: list[Call] = field(default_factory=list)

    @property
    def metal_kernel(self) -> Callable[..., UnrunKernel]:
        """Replacement for `mx.fast.metal_kernel`, with the same arguments and errors."""
        return unrun(self._record)

    def _record(self, call: Call) -> None:
        if call not in self.calls:
            self.calls.append(call)
