# SPDX-License-Identifier: Apache-2.0
"""Plays engine steps on this machine's kernels and compares them with the references."""

from metal_kernels.selfcheck.case import CHOICES, KERNELS, WAYS, Case, Check, Outcome, dtype_name
from metal_kernels.selfcheck.checks import (
    STEPS,
    check,
    check_kernel,
    checks,
    in_use,
    next_check,
    usable,
)
from metal_kernels.selfcheck.timing import Timing, Work, copy_bandwidth, works

__all__ = [
    "CHOICES",
    "KERNELS",
    "STEPS",
    "WAYS",
    "Case",
    "Check",
    "Outcome",
    "Timing",
    "Work",
    "check",
    "check_kernel",
    "checks",
    "copy_bandwidth",
    "dtype_name",
    "in_use",
    "next_check",
    "usable",
    "works",
]
