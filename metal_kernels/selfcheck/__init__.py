# SPDX-License-Identifier: Apache-2.0
"""Runs engine steps through this machine's kernels and compares them with the references."""

from metal_kernels.selfcheck.case import (
    BACKENDS,
    CHOICES,
    KERNELS,
    Case,
    Check,
    Outcome,
    StateKind,
    dtype_name,
)
from metal_kernels.selfcheck.checks import (
    STEPS,
    check_kernel,
    checks,
    next_check,
    usable,
)
from metal_kernels.selfcheck.timing import Work, copy_bandwidth, works

__all__ = [
    "BACKENDS",
    "CHOICES",
    "KERNELS",
    "STEPS",
    "Case",
    "Check",
    "Outcome",
    "StateKind",
    "Work",
    "check_kernel",
    "checks",
    "copy_bandwidth",
    "dtype_name",
    "next_check",
    "usable",
    "works",
]
