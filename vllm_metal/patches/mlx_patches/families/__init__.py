# SPDX-License-Identifier: Apache-2.0
"""Fixes mlx-lm modules that differ from transformers' classes."""
