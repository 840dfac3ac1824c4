# SPDX-License-Identifier: Apache-2.0
"""Provides the environment, default model and small KV cache of `vllm-metal chat`."""

from vllm_metal.cli.chat.surroundings import DEFAULT_KV_CACHE_GIB, default_model, prepare

__all__ = ["DEFAULT_KV_CACHE_GIB", "default_model", "prepare"]
