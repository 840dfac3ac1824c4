# SPDX-License-Identifier: Apache-2.0
"""Everything that changes MLX or mlx-lm: a module for each reason."""
