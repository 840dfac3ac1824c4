# SPDX-License-Identifier: Apache-2.0
"""What the examples share with `vllm-metal chat`: environment, default model, a small cache."""

from vllm_metal.commands.chat.surroundings import DEFAULT_KV_CACHE_GIB, default_model, prepare

__all__ = ["DEFAULT_KV_CACHE_GIB", "default_model", "prepare"]
