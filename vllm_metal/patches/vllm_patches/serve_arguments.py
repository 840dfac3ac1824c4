# SPDX-License-Identifier: Apache-2.0
"""Completes the arguments of `vllm serve` before vLLM checks them."""

# Remove when vLLM chooses parsers, or shows a platform the parsed arguments. Read against vLLM
# 0.33.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from vllm_metal.patches.vllm_patches.replacing import replace


def complete(*changes: Callable[[Namespace], None]) -> None:
    """Applies changes to a server's parsed arguments before vLLM checks them.

    Call it where a command line is made: of `vllm serve`, `vllm launch` or vLLM's server module.
    """
    # vLLM calls a platform before it parses them, and again when it makes the engine; the front
    # end's own arguments are read in between.
    from vllm.entrypoints.cli import launch, serve
    from vllm.entrypoints.common import cli_args

    def checking(check: Callable[[Namespace], None], args: Namespace) -> None:
        if getattr(args, "subparser", "serve") in ("serve", "launch"):
            for change in changes:
                change(args)
        check(args)

    for module in (cli_args, launch, serve):  # the latter two have imported the name
        replace(module, "validate_parsed_serve_args", checking)
