# SPDX-License-Identifier: Apache-2.0
"""Writes K/V into the pool, in place."""

from metal_kernels.kv_write.op import write

__all__ = ["write"]
