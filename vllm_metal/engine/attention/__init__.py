# SPDX-License-Identifier: Apache-2.0
"""Attention layers of mlx-lm's models over the paged pool, and how a model's layers are found."""
