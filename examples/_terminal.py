# SPDX-License-Identifier: Apache-2.0
"""Prints for the examples, as `vllm-metal chat --terminal` prints."""

from vllm_metal.commands.chat.terminal.prints import say, stream, table, working

__all__ = ["say", "stream", "table", "working"]
