# SPDX-License-Identifier: Apache-2.0
"""How a server ends: as a failure when its engine has died, and after its requests when told to."""

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

#: Seconds after which clients may ask again: a server starts in 10 to 15 (benchmarks/README.md).
RETRY_AFTER_S = 15
_STOPPING = {
    "error": {
        "message": "The server is stopping. Ask again later, or ask another server.",
        "type": "Service Unavailable",
        "code": 503,
    }
}


def tell_how_servers_end() -> None:
    """Has a server whose engine has died exit with status 1, and one that stops take no requests.

    vLLM's server exits with 0 either way, so whoever runs it takes a crash for an end that was
    asked for. After SIGTERM it goes on taking requests while the engine computes its last ones
    (--shutdown-timeout), and aborts them. Call this where uvicorn is loaded.
    """
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.async_llm import AsyncLLM

    replace(AsyncLLM, "shutdown", remembering_the_stop(_has_failed))
    around_servers(_turning_away)
    replace(entry, "serve_http", _ending)


def let_starts_be_interrupted() -> None:
    """Has Ctrl-C end a server that starts; call it where a server's command line is made.

    asyncio takes it as a request to cancel the task, which the start of an engine does not notice
    before the engine has started. SIGTERM ends it: vLLM has it raise in the middle.
    """
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.launchers.api_server import entry

    for module in (entry, serve):  # the latter has taken the name from the former
        replace(module, "run_server", _interruptible)


async def _interruptible(run: Callable[..., Awaitable[None]], *args: Any, **options: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # uvicorn replaces it
    await run(*args, **options)


def _has_failed(engine: Any) -> bool:
    """Whether an engine has died, or was never whole, as where its weights cannot be read."""
    return not hasattr(engine, "engine_core") or engine.errored


def _is_stopping(engine: Any) -> bool:
    return bool(getattr(engine, "told_to_stop", False))


def _turning_away(app: ASGIApp, state: Any) -> ASGIApp:
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
    """Or whether the server is ready for some (/health)."""
    if scope["type"] != "http":
        return False
    asked: str = scope["path"]
    posted = scope["method"] == "POST" and not asked.endswith("/cancel")
    return posted or asked.endswith("/health")


class TurnAway:
    """Answers 503 to new work and to /health while the server stops.

    It stands before all middlewares. Figures and stored responses may still be asked for, and
    responses cancelled.
    """

    def __init__(self, app: ASGIApp, is_stopping: Callable[[], bool]) -> None:
        """Takes the application, and what says whether it is stopping."""
        self._app, self._is_stopping = app, is_stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not (self._is_stopping() and _is_new_work(scope)):
            await self._app(scope, receive, send)
            return
        headers = {"retry-after": str(RETRY_AFTER_S), "connection": "close"}
        await JSONResponse(_STOPPING, 503, headers)(scope, receive, send)
