# SPDX-License-Identifier: Apache-2.0
"""Copies and clears whole blocks of the pool in place."""

from metal_kernels.kv_blocks.op import copy, zero

__all__ = ["copy", "zero"]
