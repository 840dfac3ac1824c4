# SPDX-License-Identifier: Apache-2.0
"""Sizes the KV pool and holds MLX to its share of memory."""
