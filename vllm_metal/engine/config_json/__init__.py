# SPDX-License-Identifier: Apache-2.0
"""Checks that mlx-lm's module honors every key of a config.json, and translates keys for it."""
