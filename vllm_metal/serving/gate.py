# SPDX-License-Identifier: Apache-2.0
"""Tenants: the ASGI middleware in front of vLLM."""

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
from vllm_metal.patches.vllm_patches.image_names import set_owner
from vllm_metal.serving import body, headers, media, metrics, response_ids, routes
from vllm_metal.serving.config import ServingConfig, required
from vllm_metal.serving.deadline import Sleep
from vllm_metal.serving.generation import ClientRequest, Generation, Shared, client_salt
from vllm_metal.serving.headers import Headers
from vllm_metal.serving.meter import Meter
from vllm_metal.serving.metrics import NOBODY, Figures
from vllm_metal.serving.refusal import Refusal
from vllm_metal.serving.response_cache.cache import ResponseCache
from vllm_metal.serving.response_cache.key import Render
from vllm_metal.serving.response_cache.stores import open_store, secret_of
from vllm_metal.serving.routes import Match, Style
from vllm_metal.serving.tenants_file import Key, KeyFile
from vllm_metal.settings import salts

logger = init_logger(__name__)

#: What makes prompts' tokens, and what says what an answer depends on; of vLLM's application.
Model = tuple[Callable[[Any], Render], Callable[[Any, Path | None], str]]
#: Fields of requests that are not generated for: their salt is the server's, and so is their id.
_NOT_PASSED_ON = {"cache_salt", "request_id"}
_UNLISTED = Refusal(404, "This server has no such route for this key.")
_SECOND_KEY = (
    "vLLM's own --api-key (VLLM_API_KEY) is not supported with "
    "VLLM_METAL_SERVING_CONFIG: a request has one Authorization header, and "
    "cached responses are sent before vLLM checks it. Leave it out, and create "
    "keys with `vllm-metal tenants add`"
)


class Tenants:
    """Checks a request's key, keeps tenants apart, answers repeats, and ends what takes too long.

    It is vLLM's outermost middleware: nothing is answered before it. Which of its parts work is
    said by the file that `VLLM_METAL_SERVING_CONFIG` names.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServingConfig | None = None,
        figures: Figures | None = None,
        sleep: Sleep = asyncio.sleep,
        model: Model | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing but the file of keys.

        Args:
            app: vLLM's.
            config: the settings; None, as vLLM has it: of the environment.
            figures: where to count; None: in vLLM's /metrics.
            sleep: how time limits wait.
            model: how prompts are rendered, and the fingerprint of the model; None: vLLM's.
            clock: seconds; says when to look at the file of keys, or at a store that failed, again.

        Raises:
            ValueError: the settings cannot be used.
        """
        config = config or required()
        self._config, self._model = config, model
        self.app, self.figures = app, figures or metrics.of_process()
        self.keys: KeyFile | None = None  # of tenants; None: there are none
        self._shared = Shared(app, config, self.figures, sleep)
        if config.tenants is not None:
            self.keys = KeyFile(config.tenants.keys, clock)
            self._shared.secret = config.tenants.read_secret()
            self._shared.meter = Meter(self.figures, self._shared.secret)
            # There before the first: a rate sees nothing of a series' first value.
            self.figures.requests.labels(NOBODY, "401")
        if config.response_cache is not None:
            store = open_store(config.response_cache)
            secret = self._shared.secret or secret_of(config.response_cache)
            self._shared.cache = ResponseCache(store, secret, self.figures, clock)
        self._begun = False
        self._learning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
        elif self.keys is not None and scope["type"] == "websocket":
            await self._refuse_socket(self.keys, scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def ready(self, state: Any) -> None:
        """Begins as with the first message, and waits until it is known which model answers.

        Args:
            state: of vLLM's application.
        """
        self._begin(state)
        if self._learning is not None:
            await self._learning

    async def aclose(self) -> None:
        """Closes the store of kept answers."""
        if self._shared.cache is not None:
            await self._shared.cache.close()

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._begin(scope["app"].state)

        async def after_closing(message: Message) -> None:
            # The server's process may end at once when it has this message.
            if message["type"].startswith("lifespan.shutdown"):
                await self.aclose()
            await send(message)

        await self.app(scope, receive, after_closing)

    def _begin(self, state: Any) -> None:
        """Begins to count tokens, and to find out which model answers: until then none is kept."""
        if self._begun:
            return
        self._begun = True
        if (meter := self._shared.meter) is not None:
            watch(state.engine_client.output_processor, meter.begin, meter.take, meter.abort)
        if self._shared.cache is not None:
            self._learning = asyncio.create_task(self._learn_model(state))

    async def _learn_model(self, state: Any) -> None:
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
        """Refuses a socket before it is accepted: as HTTP where the server can, else by a code."""
        await receive()
        try:
            _key_of(headers.read(scope), keys)
            refused = _UNLISTED
        except Refusal as error:
            refused = error
        self._count(NOBODY, refused.status)
        if "websocket.http.response" in scope.get("extensions", {}):
            await refused.response()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._begin(scope["app"].state)
        root = scope.get("root_path", "")
        match = routes.find(scope["method"], scope["path"].removeprefix(root))
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._count(tenant, message["status"])
            await send(message)

        tenant = NOBODY
        try:
            if self.keys is None:
                await self._open(match, scope, receive, send)
                return
            if match is not None and self._needs_no_key(match):
                await self._bring_figures_up_to_date(match)
                await self.app(_inner(scope, root, match), receive, send)
                return
            read = headers.read(scope)
            key = _key_of(read, self.keys)
            tenant = key.tenant
            if match is None or match.route.asks != key.purpose:
                raise _UNLISTED
            await self._serve(match, key, read, _inner(scope, root, match), receive, watched)
        except Refusal as refused:
            if not started:
                await refused.response()(scope, receive, watched if self.keys else send)
        except ClientDisconnect:
            return

    async def _bring_figures_up_to_date(self, match: Match | None) -> None:
        """Asks the store, for whoever may read /metrics and nobody else."""
        if match is not None and match.route.asks == "metrics" and self._shared.cache is not None:
            await self._shared.cache.count_bytes()

    def _needs_no_key(self, match: Match) -> bool:
        tenants = self._config.tenants
        open_metrics = tenants is not None and tenants.open_metrics
        return match.route.asks == "nothing" or (match.route.asks == "metrics" and open_metrics)

    async def _serve(
        self, match: Match, key: Key, read: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers a tenant's request of a listed route."""
        if match.response_id is not None and not response_ids.belongs(
            self._shared.secret, key.identity, match.response_id
        ):
            raise Refusal(404, "There is no response with this id.")
        scope["headers"] = [*read.passed_on]
        if match.route.style is not None:
            await self._generate(match.route.style, key, read, scope, receive, send)
        elif match.route.body:
            fields = await self._fields(read, receive)
            media.check(fields)
            salt = salts.derive(self._shared.secret, key.identity, client_salt(fields))
            set_owner(salt)
            fields = {name: each for name, each in fields.items() if name not in _NOT_PASSED_ON}
            if match.route.pools:
                fields["cache_salt"] = salt
                if self._shared.meter is not None:
                    self._shared.meter.introduce(key, salt)
            written = body.write(fields)
            scope["headers"] = headers.with_body(read.passed_on, len(written))
            await self.app(scope, _with_body(written, receive), send)
        else:
            await self._bring_figures_up_to_date(match)
            await self.app(scope, _with_body(b"", receive), send)

    async def _open(self, match: Match | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request where there are no tenants: only one that generates is looked into."""
        if match is None or match.route.style is None:
            await self._bring_figures_up_to_date(match)
            await self.app(scope, receive, send)
        else:
            read = headers.read(scope)
            await self._generate(match.route.style, None, read, dict(scope), receive, send)

    async def _generate(
        self,
        style: Style,
        key: Key | None,
        read: Headers,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self._refuse_second_key(scope)
        fields = await self._fields(read, receive)
        if key is not None:
            media.check(fields)
        request = ClientRequest(style, key, fields, read.fresh)
        await Generation(self._shared, request, scope).run(receive, send)

    async def _fields(self, read: Headers, receive: Receive) -> dict[str, Any]:
        if read.body is not None:
            raise read.body
        limits = self._config.body
        return body.parse(await body.read(receive, limits, read.length), limits)

    def _refuse_second_key(self, scope: Scope) -> None:
        """Where vLLM checks keys, too, an answer from the cache would go past it."""
        arguments = getattr(scope["app"].state, "args", None)
        if getattr(arguments, "api_key", None) or os.environ.get("VLLM_API_KEY"):
            raise Refusal(500, f"{_SECOND_KEY}.")

    def _count(self, tenant: str, status: int) -> None:
        self.figures.requests.labels(tenant, str(status)).inc()


def _key_of(read: Headers, keys: KeyFile) -> Key:
    """Whose key a request has.

    Raises:
        Refusal: it has none that is in the file, or headers that could be read in two ways.
    """
    if read.has_controls:
        raise Refusal(400, "A header has control characters in it.")
    key = None if read.api_key is None else keys.find(read.api_key)
    if key is None:
        raise headers.NO_KEY
    return key


def _inner(scope: Scope, root: str, match: Match) -> Scope:
    """A scope for vLLM that has nothing but what was looked at."""
    if not match.route.query:
        # In the server's own scope, too: a key in it would stand in the log of requests.
        scope["query_string"] = b""
    path = root + match.path
    return {**scope, "path": path, "raw_path": path.encode()}


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
