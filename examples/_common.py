# SPDX-License-Identifier: Apache-2.0
"""Shared with `vllm-metal chat`: environment, default model, a small KV cache."""

from vllm_metal.cli.chat.surroundings import DEFAULT_KV_CACHE_GIB, default_model, prepare

__all__ = ["DEFAULT_KV_CACHE_GIB", "default_model", "prepare"]
