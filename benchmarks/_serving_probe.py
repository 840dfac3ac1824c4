# SPDX-License-Identifier: Apache-2.0
"""The class that stands before vLLM, and a way past it; and where a server's time goes.

A server runs it as its middleware (`--middleware _serving_probe.Probe`), for serving_cpu.py.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from vllm_metal.serving.gate import Tenants

#: The header of a request that goes past the class: it has a salt that the class would write.
PAST = b"x-past-the-class"
#: Paths that begin to take samples, and end with what was found.
START, STOP = "/probe/start", "/probe/stop"
_EVERY_S = 0.001  # of CPU time of the process
_OURS = f"{Path(__file__).resolve().parents[1]}/vllm_metal/"
#: Parts of paths, and what stands for their time where nothing above it in the stack says more.
_OTHERS = {
    "/site-packages/vllm/": "vLLM",
    "/site-packages/uvicorn/": "uvicorn",
    "/site-packages/starlette/": "Starlette, FastAPI",
    "/site-packages/fastapi/": "Starlette, FastAPI",
}


class Probe(Tenants):
    """Samples the main thread's stack, by the process's own time."""

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
    """Whose time it is: of the innermost function that is not a library's."""
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
