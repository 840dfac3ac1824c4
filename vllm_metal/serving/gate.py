# SPDX-License-Identifier: Apache-2.0
"""Tenants: the ASGI middleware around vLLM's application."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.logger import init_logger

from vllm_metal.patches.vllm_patches.engine_outputs import watch
from vllm_metal.serving import body, headers, response_ids, routes, tenant_request
from vllm_metal.serving.config import ServingConfig, required
from vllm_metal.serving.deadline import Sleep
from vllm_metal.serving.generation import Generation
from vllm_metal.serving.headers import Headers
from vllm_metal.serving.meter import Meter
from vllm_metal.serving.metrics import NO_TENANT, ServerMetrics, of_process
from vllm_metal.serving.refusal import Refusal
from vllm_metal.serving.response_cache.cache import ResponseCache
from vllm_metal.serving.response_cache.key import Render
from vllm_metal.serving.response_cache.stores import open_store, secret_of
from vllm_metal.serving.routes import Match, Route
from vllm_metal.serving.tenant_request import Shared
from vllm_metal.serving.tenants_file import Key, KeyFile

logger = init_logger(__name__)

#: Prompt renderer and model fingerprint; both take vLLM's application state.
Model = tuple[Callable[[Any], Render], Callable[[Any, Path | None], str]]
_UNLISTED = Refusal(404, "This server has no such route for this key.")
_SECOND_KEY = (
    "vLLM's own --api-key (VLLM_API_KEY) is not supported with "
    "VLLM_METAL_SERVING_CONFIG: a request has one Authorization header, and "
    "cached responses are sent before vLLM checks it. Leave it out, and create "
    "keys with `vllm-metal tenants add`"
)


class Tenants:
    """Authenticates requests, isolates tenants, serves cached responses, and enforces deadlines.

    It is vLLM's outermost middleware, so that no response bypasses it. The file of
    `VLLM_METAL_SERVING_CONFIG` enables its parts.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServingConfig | None = None,
        metrics: ServerMetrics | None = None,
        sleep: Sleep = asyncio.sleep,
        model: Model | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens only the file of keys.

        Args:
            config: settings; None, as from vLLM: those of the file that the environment names.
            metrics: metrics to update; None: those in vLLM's /metrics.
            sleep: waits a number of seconds, for deadlines.
            model: functions that render prompts and fingerprint the model; None: `rendering`'s.
            clock: returns seconds, to decide when to retry the keys or a failed store.

        Raises:
            ValueError: the settings cannot be used.
        """
        config = config or required()
        self._config, self._model = config, model
        self.app, self.metrics = app, metrics or of_process()
        self.keys: KeyFile | None = None  # keys of tenants; None: no tenants
        self._shared = Shared(app, config, self.metrics, sleep)
        if config.tenants is not None:
            self.keys = KeyFile(config.tenants.keys, clock)
            self._shared.secret = config.tenants.read_secret()
            self._shared.meter = Meter(self.metrics, self._shared.secret)
            # Created before the first request: Prometheus' rate() misses the step to a first value.
            self.metrics.requests.labels(NO_TENANT, "401")
        if config.response_cache is not None:
            store = open_store(config.response_cache)
            secret = self._shared.secret or secret_of(config.response_cache)
            self._shared.cache = ResponseCache(store, secret, self.metrics, clock)
        self._started = False
        self._identifying: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._handle_lifespan(scope, receive, send)
        elif self.keys is not None and scope["type"] == "websocket":
            await self._refuse_socket(self.keys, scope, receive, send)
        elif scope["type"] == "http":
            await self._handle_request(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def ready(self, state: Any) -> None:
        """Starts counting tokens, and waits until the model is identified for the response cache.

        `state`: state of vLLM's application.
        """
        self._start(state)
        if self._identifying is not None:
            await self._identifying

    async def aclose(self) -> None:
        """Closes the response cache's store."""
        if self._shared.cache is not None:
            await self._shared.cache.close()

    async def _handle_lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._start(scope["app"].state)

        async def after_closing(message: Message) -> None:
            # Before the message is sent: the server's process may end as soon as it has it.
            if message["type"].startswith("lifespan.shutdown"):
                await self.aclose()
            await send(message)

        await self.app(scope, receive, after_closing)

    def _start(self, state: Any) -> None:
        """Starts counting tokens, and identifying the model; until then nothing is cached."""
        if self._started:
            return
        self._started = True
        if (meter := self._shared.meter) is not None:
            watch(state.engine_client.output_processor, meter.begin, meter.take, meter.abort)
        if self._shared.cache is not None:
            # In a task: it reads all weights, up to a minute, while requests are served.
            self._identifying = asyncio.create_task(self._identify_model(state))

    async def _identify_model(self, state: Any) -> None:
        config = self._config.response_cache
        assert config is not None
        try:
            if self._model is None:
                from vllm_metal.serving.response_cache import rendering

                self._model = (rendering.renderer, rendering.fingerprint)
            self._shared.render, fingerprint = self._model
            memo = None if config.path is None else config.path / "weights.json"
            self._shared.model = await asyncio.to_thread(fingerprint, state, memo)
        except Exception:
            logger.exception("The response cache is off: the served model cannot be identified.")

    async def _refuse_socket(
        self, keys: KeyFile, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Rejects a websocket by an HTTP response if the server can, else by a close code."""
        await receive()
        try:
            _key_of(headers.read(scope), keys)
            refused = _UNLISTED
        except Refusal as error:
            refused = error
        _count(self.metrics, NO_TENANT, refused.status)
        if "websocket.http.response" in scope.get("extensions", {}):
            await refused.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._start(scope["app"].state)
        client = _Client(send, None if self.keys is None else self.metrics)
        root = scope.get("root_path", "")
        match = routes.find(scope["method"], scope["path"].removeprefix(root))
        sent = headers.read(scope)
        key = None
        try:
            if self.keys is not None:
                match, key = self._admit(self.keys, match, sent, client)
                scope = _inner_scope(scope, root, match)
                if key is not None:
                    scope["headers"] = [*sent.forwarded]
                    self._check_response_id(match, key)
            await self._serve(match, key, sent, scope, receive, client)
        except Refusal as refused:
            if not client.started:
                await refused.response()(scope, receive, client)
        except ClientDisconnect:
            return

    def _admit(
        self, keys: KeyFile, match: Match | None, sent: Headers, client: _Client
    ) -> tuple[Match, Key | None]:
        """Returns the route and the request's key, None if the route needs no key.

        Raises Refusal if the key is missing or not valid for this route.
        """
        if match is not None and self._needs_no_key(match):
            return match, None
        key = _key_of(sent, keys)
        client.tenant = key.tenant
        if match is None or match.route.required_key != key.purpose:
            raise _UNLISTED
        return match, key

    def _check_response_id(self, match: Match, key: Key) -> None:
        if match.response_id is not None and not response_ids.belongs(
            self._shared.secret, key.identity, match.response_id
        ):
            raise Refusal(404, "There is no response with this id.")

    async def _serve(
        self,
        match: Match | None,
        key: Key | None,
        sent: Headers,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serves an admitted request. Without tenants, only generation requests are parsed."""
        route = None if match is None else match.route
        if route is None or not (route.style if key is None else route.body):
            await self._update_cache_size(route)
            # A tenant's body that was not checked must not reach vLLM.
            receive = receive if key is None else body.replayed(b"", receive)
            await self.app(scope, receive, send)
            return
        if route.style is not None:
            self._refuse_second_key(scope)
        request = await tenant_request.read(self._shared, route, key, sent, scope, receive)
        if route.style is not None:
            await Generation(self._shared, request, route.style).run(receive, send)
        else:
            await self.app(request.scope, body.replayed(request.body, receive), send)

    async def _update_cache_size(self, route: Route | None) -> None:
        # Only for those who may read /metrics: it queries the store.
        if route is not None and route.required_key == "metrics" and self._shared.cache is not None:
            await self._shared.cache.count_bytes()

    def _needs_no_key(self, match: Match) -> bool:
        tenants = self._config.tenants
        open_metrics = tenants is not None and tenants.open_metrics
        return match.route.required_key == "nothing" or (
            match.route.required_key == "metrics" and open_metrics
        )

    def _refuse_second_key(self, scope: Scope) -> None:
        # A cached response would bypass vLLM's own key check.
        arguments = getattr(scope["app"].state, "args", None)
        if getattr(arguments, "api_key", None) or os.environ.get("VLLM_API_KEY"):
            raise Refusal(500, f"{_SECOND_KEY}.")


class _Client:
    """Wraps a client's `send` to count the response's status for its tenant."""

    def __init__(self, send: Send, metrics: ServerMetrics | None) -> None:
        self._send, self._metrics = send, metrics  # None without tenants
        self.tenant = NO_TENANT
        self.started = False  # whether a response has begun

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            if self._metrics is not None:
                _count(self._metrics, self.tenant, message["status"])
        await self._send(message)


def _count(metrics: ServerMetrics, tenant: str, status: int) -> None:
    metrics.requests.labels(tenant, str(status)).inc()


def _key_of(sent: Headers, keys: KeyFile) -> Key:
    """Returns a request's key; raises Refusal if it is unknown or a header is ambiguous."""
    if sent.has_controls:
        raise Refusal(400, "A header has control characters in it.")
    key = None if sent.api_key is None else keys.find(sent.api_key)
    if key is None:
        raise headers.NO_KEY
    return key


def _inner_scope(scope: Scope, root: str, match: Match) -> Scope:
    """Returns the scope to pass to vLLM, with the checked path and an allowed query only."""
    if not match.route.query:
        # Also in the server's own scope: the access log would show a key in the query string.
        scope["query_string"] = b""
    path = root + match.path
    return {**scope, "path": path, "raw_path": path.encode()}
