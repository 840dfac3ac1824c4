# SPDX-License-Identifier: Apache-2.0
"""Reads the contexts of requests from the pool."""

from metal_kernels.kv_gather.op import gather

__all__ = ["gather"]
