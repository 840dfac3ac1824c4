# SPDX-License-Identifier: Apache-2.0
"""How much memory the KV pool may take, and how MLX is held to it."""
