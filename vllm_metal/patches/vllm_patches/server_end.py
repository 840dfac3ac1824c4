# SPDX-License-Identifier: Apache-2.0
"""Ends a server with status 1 if its engine died, and after its requests if it was stopped."""

# Remove when vLLM's own exit status is not 0, and it rejects requests while the engine drains.
# Read against vLLM 0.33.

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.patches.vllm_patches.server_app import around_servers
from vllm_metal.patches.vllm_patches.shutdown import remembering_the_stop

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Seconds after which clients may retry: a server starts in 10 to 15 (benchmarks/README.md).
RETRY_AFTER_S = 15
_STOPPING = {
    "error": {
        "message": "The server is stopping. Ask again later, or ask another server.",
        "type": "Service Unavailable",
        "code": 503,
    }
}


def set_server_exit() -> None:
    """Makes a server exit with 1 if its engine died, and reject requests while it stops.

    Call this where uvicorn is loaded.
    """
    # vLLM's server exits with 0 either way, so a supervisor takes a crash for a requested stop.
    # After SIGTERM it still takes requests while the engine computes its last ones
    # (--shutdown-timeout), and then aborts them.
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.async_llm import AsyncLLM

    replace(AsyncLLM, "shutdown", remembering_the_stop(_has_failed))
    around_servers(_reject_while_stopping)
    replace(entry, "serve_http", _ending)


def let_starts_be_interrupted() -> None:
    """Makes Ctrl-C end a starting server; call it where a server's command line is made."""
    # asyncio turns Ctrl-C into a cancellation of the task, which an engine's start only notices
    # when it is over. SIGTERM does end the start: vLLM raises in its handler.
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.launchers.api_server import entry

    for module in (entry, serve):  # the latter has imported the name
        replace(module, "run_server", _interruptible)


async def _interruptible(run: Callable[..., Awaitable[None]], *args: Any, **options: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # uvicorn replaces it
    await run(*args, **options)


def _has_failed(engine: Any) -> bool:
    # An engine without `engine_core` never started, for example with unreadable weights.
    return not hasattr(engine, "engine_core") or engine.errored


def _is_stopping(engine: Any) -> bool:
    return bool(getattr(engine, "told_to_stop", False))


def _reject_while_stopping(app: ASGIApp, state: Any) -> ASGIApp:
    return TurnAway(app, lambda: _is_stopping(state.engine_client))


async def _ending(
    serve_http: Callable[..., Awaitable[Awaitable[None]]], app: Any, *args: Any, **options: Any
) -> Awaitable[None]:
    engine = app.state.engine_client
    ending = await serve_http(app, *args, **options)
    died = engine is not None and engine.errored and not _is_stopping(engine)
    return _failed(ending) if died else ending


async def _failed(ending: Awaitable[None]) -> None:
    await ending
    raise SystemExit(1)


def _is_new_work(scope: Scope) -> bool:
    # /health counts as new work: it says whether the server is ready for some.
    if scope["type"] != "http":
        return False
    path: str = scope["path"]
    posted = scope["method"] == "POST" and not path.endswith("/cancel")
    return posted or path.endswith("/health")


class TurnAway:
    """Answers 503 to new work and to /health while the server stops, before all middlewares.

    Metrics and stored responses stay available, and responses can be cancelled.
    """

    def __init__(self, app: ASGIApp, is_stopping: Callable[[], bool]) -> None:
        """`is_stopping` returns whether the server is stopping."""
        self._app, self._is_stopping = app, is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (self._is_stopping() and _is_new_work(scope)):
            await self._app(scope, receive, send)
            return
        headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
        await JSONResponse(_STOPPING, 503, headers)(scope, receive, send)
