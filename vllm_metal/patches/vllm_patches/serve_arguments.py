# SPDX-License-Identifier: Apache-2.0
"""Completes the arguments of `vllm serve` before vLLM checks them."""

# Remove when vLLM chooses parsers, or shows a platform the parsed arguments. Read against vLLM
# 0.33.

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from vllm_metal.patches.vllm_patches.replacing import replace


def complete(*changes: Callable[[Namespace], None]) -> None:
    """Has a server's parsed arguments changed, before they are checked and its engine is made.

    vLLM asks a platform before it parses them, and again when it makes the engine; the front end's
    own arguments are read in between. Call this where a server's command line is made.

    Args:
        changes: of the arguments of `vllm serve`, `vllm launch` and vLLM's module of the server.
    """
    from vllm.entrypoints.cli import launch, serve
    from vllm.entrypoints.common import cli_args

    def checking(check: Callable[[Namespace], None], args: Namespace) -> None:
        if getattr(args, "subparser", "serve") in ("serve", "launch"):
            for change in changes:
                change(args)
        check(args)

    for module in (cli_args, launch, serve):  # these two have taken the name from the first
        replace(module, "validate_parsed_serve_args", checking)
