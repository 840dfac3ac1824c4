# SPDX-License-Identifier: Apache-2.0
"""The machine: its memory, its MLX device, and whether the kernels work on it."""
