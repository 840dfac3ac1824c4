# SPDX-License-Identifier: Apache-2.0
"""All changes to the code of vLLM, torch, MLX and mlx-lm; nothing else patches them."""
