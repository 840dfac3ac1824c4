# SPDX-License-Identifier: Apache-2.0
"""Computes the KV pool's size, and sets MLX's memory limits."""
