# SPDX-License-Identifier: Apache-2.0
"""Convolves each channel along the rows of each request, with states in the pool."""

from metal_kernels.convolution.op import run

__all__ = ["run"]
