# SPDX-License-Identifier: Apache-2.0
"""All changes to MLX and mlx-lm, one module per reason."""
