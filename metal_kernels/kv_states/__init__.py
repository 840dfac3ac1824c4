# SPDX-License-Identifier: Apache-2.0
"""Reads and writes states stored in whole blocks of the pool."""

from metal_kernels.kv_states.op import read, write

__all__ = ["read", "write"]
