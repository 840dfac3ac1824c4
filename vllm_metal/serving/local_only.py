# SPDX-License-Identifier: Apache-2.0
"""Protects the server that `vllm-metal launch` starts for its client.

vLLM checks its key only on some path prefixes, and accepts any Host. Other routes reach the engine,
too, so other users of the machine could use it, and so could a web page by DNS rebinding.
"""

from __future__ import annotations

import hmac
import os
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_metal.serving import headers
from vllm_metal.serving.refusal import Refusal

MIDDLEWARE = "vllm_metal.serving.local_only.LocalOnly"
_HOSTS = re.compile(rb"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?", re.IGNORECASE)
_OTHER_HOST = Refusal(403, "This server only answers to 127.0.0.1 and localhost.")


class LocalOnly:
    """Middleware that requires the key on all routes but /health, and this machine as Host."""

    def __init__(self, app: ASGIApp) -> None:
        """Raises ValueError if VLLM_API_KEY is not set."""
        self.app = app
        self._key = os.environ.get("VLLM_API_KEY", "").encode()
        if not self._key:
            raise ValueError(f"--middleware {MIDDLEWARE} needs a key: set VLLM_API_KEY")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (refused := self._refusal(scope)) is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refused.response()(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> Refusal | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or not _HOSTS.fullmatch(hosts[0]):
            return _OTHER_HOST
        if (scope["type"], scope.get("method"), scope["path"]) == ("http", "GET", "/health"):
            return None
        given = headers.read(scope).api_key
        if given is None or not hmac.compare_digest(given.encode(), self._key):
            return headers.NO_KEY
        return None
