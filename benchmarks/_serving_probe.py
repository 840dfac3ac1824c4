# SPDX-License-Identifier: Apache-2.0
"""Middleware for serving_cpu.py that bypasses `Tenants` on request and samples the server's stack.

Loaded with `--middleware _serving_probe.Probe`.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_metal.serving.gate import Tenants

#: Header of a request that bypasses the class; it carries the salt that the class would set.
PAST = b"x-past-the-class"
#: Paths that start sampling, and return the result.
START, STOP = "/probe/start", "/probe/stop"
_EVERY_S = 0.001  # of CPU time of the process
_OURS = f"{Path(__file__).resolve().parents[1]}/vllm_metal/"
#: Maps parts of paths to a label, unless a frame above is more specific.
_OTHERS = {
    "/site-packages/vllm/": "vLLM",
    "/site-packages/uvicorn/": "uvicorn",
    "/site-packages/starlette/": "Starlette, FastAPI",
    "/site-packages/fastapi/": "Starlette, FastAPI",
}


class Probe(Tenants):
    """Samples the main thread's stack, timed by the process's CPU time."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.found: Counter[str] = Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in (START, STOP):
            await self._switch(scope["path"] == START, send)
        elif scope["type"] == "http" and any(name == PAST for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _switch(self, start: bool, send: Any) -> None:
        body = json.dumps(self.found).encode()
        if start:
            self.found.clear()
            signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, *((_EVERY_S, _EVERY_S) if start else (0, 0)))
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _sample(self, _: int, frame: FrameType | None) -> None:
        self.found[_place(frame)] += 1


def _place(frame: FrameType | None) -> str:
    """Returns the label of the innermost non-library function."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return file.removeprefix(_OURS)
        for part, name in _OTHERS.items():
            if part in file:
                return name
        if file.endswith("/selectors.py"):
            return "other threads, system"  # the event loop waits
        frame = frame.f_back
    return "event loop"
