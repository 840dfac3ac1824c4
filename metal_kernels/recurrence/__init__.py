# SPDX-License-Identifier: Apache-2.0
"""Advances recurrent states by tokens, in the pool, with an output per row."""

from metal_kernels.recurrence.op import run

__all__ = ["run"]
