# SPDX-License-Identifier: Apache-2.0
"""Modules of mlx-lm's that differ from transformers' classes, mended."""
