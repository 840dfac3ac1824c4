# SPDX-License-Identifier: Apache-2.0
"""Causal convolution of each channel over the tokens of each request, with states in the pool."""

from metal_kernels.convolution.op import run

__all__ = ["run"]
