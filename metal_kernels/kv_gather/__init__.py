# SPDX-License-Identifier: Apache-2.0
"""Reads requests' contexts out of the pool."""

from metal_kernels.kv_gather.op import gather

__all__ = ["gather"]
