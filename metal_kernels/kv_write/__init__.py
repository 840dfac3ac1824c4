# SPDX-License-Identifier: Apache-2.0
"""Writes K/V into the pool in place, and optionally rotates keys and queries."""

from metal_kernels.kv_write.op import rotate_and_write, write
from metal_kernels.kv_write.rotation import Rotation, RotationKind

__all__ = ["Rotation", "RotationKind", "rotate_and_write", "write"]
