# SPDX-License-Identifier: Apache-2.0
"""Estimates kernels' costs from the assembly that LLVM's AMD GPU back end makes of them.

from metal_interpreter import proxy
from metal_kernels import kernel
recorder = proxy.Recorder()
with kernel.using(recorder.metal_kernel):
    ...
figures = [proxy.measure(call) for call in recorder.calls]
"""

from ..unrun import Call
from .assembly import FAST_SUM, SLOW_SUM, Batch, Figures, read
from .measure import measure
from .recorder import Recorder

__all__ = [
    "FAST_SUM",
    "SLOW_SUM",
    "Batch",
    "Call",
    "Figures",
    "Recorder",
    "measure",
    "read",
]
