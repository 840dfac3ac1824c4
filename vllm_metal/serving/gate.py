# SPDX-License-Identifier: Apache-2.0
"""Tenants: the ASGI class that stands before vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from vllm_metal.serving import body, headers, refusal, response_ids, routes
from vllm_metal.serving import figures as figures_of
from vllm_metal.serving.config import ServingConfig, required
from vllm_metal.serving.deadline import Sleep
from vllm_metal.serving.figures import NOBODY, Figures
from vllm_metal.serving.generation import Asked, Generation, Parts
from vllm_metal.serving.meter import Meter
from vllm_metal.serving.refusal import App, Disconnected, Message, Receive, Refusal, Scope, Send
from vllm_metal.serving.response_cache import seal
from vllm_metal.serving.response_cache.cache import ResponseCache
from vllm_metal.serving.response_cache.key import Render
from vllm_metal.serving.response_cache.stores import open_store
from vllm_metal.serving.routes import Found
from vllm_metal.serving.tenants_file import Key, KeyFile
from vllm_metal.vllm_patches.engine_outputs import watch

logger = init_logger(__name__)

#: What makes prompts' tokens, and what says what an answer depends on; of vLLM's application.
Model = tuple[Callable[[Any], Render], Callable[[Any, Path | None], str]]
_UNLISTED = Refusal(404, "This server has no such route for this key.")
_SECOND_KEY = (
    "vLLM's own --api-key (VLLM_API_KEY) cannot go with VLLM_METAL_SERVING_CONFIG: a request has "
    "one Authorization header, and kept answers are given before vLLM looks at it. Leave it out, "
    "and make keys by `vllm-metal tenants add`"
)


class Tenants:
    """Checks a request's key, keeps tenants apart, answers repeats, and ends what takes too long.

    It is vLLM's outermost middleware: nothing is answered before it. Which of its parts work is
    said by the file that `VLLM_METAL_SERVING_CONFIG` names.
    """

    def __init__(
        self,
        app: App,
        config: ServingConfig | None = None,
        figures: Figures | None = None,
        sleep: Sleep = asyncio.sleep,
        model: Model | None = None,
    ) -> None:
        """Opens nothing but the file of keys.

        Args:
            app: vLLM's.
            config: the settings; None, as vLLM has it: of the environment.
            figures: where to count; None: in vLLM's /metrics.
            sleep: how time limits wait.
            model: how prompts are rendered, and the fingerprint of the model; None: vLLM's.

        Raises:
            ValueError: the settings cannot be used.
        """
        config = config or required()
        self._config, self._model = config, model
        self._keys: KeyFile | None = None
        self._parts = Parts(app, config, figures or figures_of.of_process(), sleep)
        if config.tenants is not None:
            self._keys = KeyFile(config.tenants.keys)
            self._parts.secret = config.tenants.read_secret()
            self._parts.meter = Meter(self._parts.figures, self._parts.secret)
            # There before the first: a rate sees nothing of a series' first value.
            self._parts.figures.requests.labels(tenant=NOBODY, status="401")
        if config.response_cache is not None:
            store = open_store(config.response_cache)
            secret = self._parts.secret or seal.secret_of(config.response_cache)
            self._parts.cache = ResponseCache(store, secret, self._parts.figures)
        self._begun = False
        self._learning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif self._keys is not None and scope["type"] == "websocket":
            await self._refuse_socket(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._parts.app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._begin(scope)

        async def after_closing(message: Message) -> None:
            # The server's process may end at once when it has this message.
            if message["type"].startswith("lifespan.shutdown") and self._parts.cache is not None:
                await self._parts.cache.close()
            await send(message)

        await self._parts.app(scope, receive, after_closing)

    def _begin(self, scope: Scope) -> None:
        """Begins to count tokens, and to find out which model answers: until then none is kept."""
        if self._begun:
            return
        self._begun, state = True, scope["app"].state
        if self._parts.meter is not None:
            watch(state.engine_client.output_processor, self._parts.meter)
        if self._parts.cache is not None:
            self._learning = asyncio.create_task(self._learn_model(state))

    async def _learn_model(self, state: Any) -> None:
        config = self._config.response_cache
        assert config is not None
        try:
            if self._model is None:
                from vllm_metal.serving.response_cache import rendering

                self._model = (rendering.renderer, rendering.fingerprint)
            self._parts.render, fingerprint = self._model
            memo = None if config.path is None else config.path / "weights.json"
            self._parts.model = await asyncio.to_thread(fingerprint, state, memo)
        except Exception:
            logger.exception("The response cache is off: it cannot tell which model answers.")

    async def _refuse_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Before it is accepted, as HTTP where the server can, else with the code for a policy."""
        await receive()
        try:
            self._key_of(scope)
            found = _UNLISTED
        except Refusal as refused:
            found = refused
        self._count(NOBODY, found.status)
        if "websocket.http.response" in scope.get("extensions", {}):
            await refusal.answer(send, found, "websocket.http")
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._begin(scope)
        root = scope.get("root_path", "")
        found = routes.find(scope["method"], scope["path"].removeprefix(root))
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(tenant, message["status"])
            await send(message)

        tenant = NOBODY
        try:
            if self._keys is None:
                await self._open(found, scope, receive, send)
                return
            if found is not None and self._needs_no_key(found):
                await self._bring_figures_up_to_date(found)
                await self._parts.app(_inner(scope, root, found), receive, send)
                return
            key = self._key_of(scope)
            tenant = key.tenant
            if found is None or found.route.asks != key.purpose:
                raise _UNLISTED
            await self._serve(found, key, _inner(scope, root, found), receive, watched)
        except Refusal as refused:
            if not started:
                await refusal.answer(watched if self._keys else send, refused)
        except Disconnected:
            return

    async def _bring_figures_up_to_date(self, found: Found | None) -> None:
        """Asks the store, for whoever may read /metrics and nobody else."""
        if found is not None and found.route.asks == "metrics" and self._parts.cache is not None:
            await self._parts.cache.count_bytes()

    def _needs_no_key(self, found: Found) -> bool:
        tenants = self._config.tenants
        open_metrics = tenants is not None and tenants.open_metrics
        return found.route.asks == "nothing" or (found.route.asks == "metrics" and open_metrics)

    def _key_of(self, scope: Scope) -> Key:
        """Whose key a request has.

        Raises:
            Refusal: it has none that is in the file.
        """
        assert self._keys is not None
        headers.check(scope["headers"])
        key = self._keys.find(headers.api_key(scope["headers"]))
        if key is None:
            raise headers.NO_KEY
        return key

    async def _serve(
        self, found: Found, key: Key, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """A tenant's request of a listed route."""
        route, app = found.route, self._parts.app
        if found.response_id is not None and not response_ids.belongs(
            self._parts.secret, key.identity, found.response_id
        ):
            raise Refusal(404, "There is no response with this id.")
        if not route.body:
            await self._bring_figures_up_to_date(found)
            scope["headers"] = headers.passed_on(scope["headers"])
            await app(scope, _without_body(receive), send)
        elif route.style is None:
            fields = await self._fields(scope, receive)
            fields.pop("cache_salt", None)
            written = body.write(fields)
            passed = headers.passed_on(scope["headers"])
            scope["headers"] = headers.with_body(passed, len(written))
            await app(scope, _with_body(written, receive), send)
        else:
            await self._generate(found, key, scope, receive, send)

    async def _open(self, found: Found | None, scope: Scope, receive: Receive, send: Send) -> None:
        """A request where there are no tenants: only those that generate are looked into."""
        if found is None or found.route.style is None:
            await self._bring_figures_up_to_date(found)
            await self._parts.app(scope, receive, send)
        else:
            await self._generate(found, None, dict(scope), receive, send)

    async def _generate(
        self, found: Found, key: Key | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._refuse_second_key(scope)
        fresh = headers.wants_fresh(scope["headers"])
        fields = await self._fields(scope, receive)
        if key is not None:
            scope["headers"] = headers.passed_on(scope["headers"])
        assert found.route.style is not None
        asked = Asked(found.route.style, key, fields, fresh)
        await Generation(self._parts, asked, scope).run(receive, send)

    async def _fields(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        headers.check_json(scope["headers"])
        length = headers.content_length(scope["headers"])
        limits = self._config.body
        return body.parse(await body.read(receive, limits, length), limits)

    def _refuse_second_key(self, scope: Scope) -> None:
        """Where vLLM checks keys, too, an answer from the cache would go past it."""
        arguments = getattr(scope["app"].state, "args", None)
        if getattr(arguments, "api_key", None) or os.environ.get("VLLM_API_KEY"):
            raise Refusal(500, f"{_SECOND_KEY}.")

    def _count(self, tenant: str, status: int) -> None:
        self._parts.figures.requests.labels(tenant=tenant, status=str(status)).inc()


def _inner(scope: Scope, root: str, found: Found) -> Scope:
    """A scope for vLLM that has nothing but what was looked at."""
    if not found.route.query:
        # In the server's own scope, too: a key in it would stand in the log of requests.
        scope["query_string"] = b""
    path = root + found.path
    return {**scope, "path": path, "raw_path": path.encode()}


def _without_body(receive: Receive) -> Receive:
    return _with_body(b"", receive)


def _with_body(written: bytes, receive: Receive) -> Receive:
    """Gives vLLM a body, and after it the end of the connection."""
    given = False

    async def messages() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": written, "more_body": False}
        await body.until_gone(receive)
        return {"type": "http.disconnect"}

    return messages
