# SPDX-License-Identifier: Apache-2.0
"""Brings recurrent states from token to token, in the pool, with an output for each row."""

from metal_kernels.recurrence.op import run

__all__ = ["run"]
