# SPDX-License-Identifier: Apache-2.0
"""Puts applications of ours around the one that a server of vLLM's serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_metal.vllm_patches.replacing import replace

_WRAPS: list[Callable[[Any, Any], Any]] = []  # of each server that starts, the innermost first


def around_servers(wrap: Callable[[Any, Any], Any]) -> None:
    """Has each server run what `wrap` makes of its application and that one's state.

    What came later stands around what came before. Call this where uvicorn is loaded; the same
    function a second time changes nothing.
    """
    from vllm.entrypoints.launchers.api_server import entry

    if wrap not in _WRAPS:
        _WRAPS.append(wrap)
    replace(entry, "serve_http", _serving)


async def _serving(serve_http: Callable[..., Any], app: Any, *args: Any, **options: Any) -> Any:
    # vLLM has put the middlewares together already.
    stack = app.middleware_stack or app.build_middleware_stack()
    for wrap in _WRAPS:
        stack = wrap(stack, app.state)
    app.middleware_stack = stack
    return await serve_http(app, *args, **options)
