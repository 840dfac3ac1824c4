# SPDX-License-Identifier: Apache-2.0
"""Transfers pages of K/V between engines. Blocking and thread-safe; independent of MLX and vLLM."""
