# SPDX-License-Identifier: Apache-2.0
"""Records calls of kernels, so that what operations launch can be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..unrun import Call, UnrunKernel, unrun


@dataclass(frozen=True, eq=False)
class Recorder:
    """Makes kernels like `mx.fast.metal_kernel` that run nothing: outputs are zeros."""

    #: Each once, in the order of the first call of it.
    calls: list[Call] = field(default_factory=list)

    @property
    def metal_kernel(self) -> Callable[..., UnrunKernel]:
        """As `mx.fast.metal_kernel`."""
        return unrun(self._record)

    def _record(self, call: Call) -> None:
        if call not in self.calls:
            self.calls.append(call)
