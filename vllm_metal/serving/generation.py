# SPDX-License-Identifier: Apache-2.0
"""Answers one generation request, from the response cache or from the engine."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Send

from vllm_metal.serving import body
from vllm_metal.serving.deadline import Deadline
from vllm_metal.serving.duration import Duration
from vllm_metal.serving.exchange import Exchange
from vllm_metal.serving.refusal import Refusal
from vllm_metal.serving.response_cache import complete, key
from vllm_metal.serving.response_cache.cache import Abandoned, Lead, NotCacheable
from vllm_metal.serving.response_cache.entry import Entry, Form
from vllm_metal.serving.routes import Style
from vllm_metal.serving.tenant_request import Shared, TenantRequest

_SHORT = 1 << 15  # bytes of a response that parse faster than a thread takes to start
_MEDIA: dict[Form, str] = {"whole": "application/json", "stream": "text/event-stream"}


class Generation:
    """One generation request, from its checked body to the end of its response."""

    def __init__(self, shared: Shared, request: TenantRequest, style: Style) -> None:
        self._shared, self._request, self._style = shared, request, style
        self._deadline = Deadline(shared.config.timeout_s, shared.sleep)

    async def run(self, receive: Receive, send: Send) -> None:
        request, metrics = self._request, self._shared.metrics
        duration = Duration(metrics, receive, send)
        receive, send = duration.receive, duration.send
        engine = request.scope["app"].state.engine_client
        self._deadline.start(request.request_id, engine, metrics.timeouts.inc)
        try:
            cache_key = await self._key()
            if cache_key is None:
                result = None if self._shared.cache is None else "bypass"
                await self._forward(receive, send, result)
            else:
                await self._answer_or_join(cache_key, receive, send)
        finally:
            self._deadline.end()
            duration.end(self._deadline.expired.done(), request.parsed.background)

    async def _key(self) -> str | None:
        """Returns the response-cache key; None if the request bypasses the cache."""
        shared, request = self._shared, self._request
        if shared.cache is None or shared.render is None or shared.model is None or request.fresh:
            return None
        if not request.parsed.repeatable:
            return None
        render = shared.render(request.scope["app"].state)
        return await key.of_request(
            self._style, request.fields, request.parsed, request.identity, shared.model, render
        )

    async def _answer_or_join(self, cache_key: str, receive: Receive, send: Send) -> None:
        """Answers from the cache, from the response to an equal request in flight, or by vLLM."""
        cache = self._shared.cache
        assert cache is not None
        while (waiting := cache.coalesced.join(cache_key)) is not None:
            try:
                await self._replay(await self._wait(waiting, receive), receive, send)
            except Abandoned:
                continue
            except NotCacheable:
                await self._forward(receive, send, "miss")
            return
        lead = cache.coalesced.lead(cache_key)
        outcome: Entry | Exception = Abandoned()
        try:
            entry = await cache.get(cache_key, self._request.owner)
            if entry is None:
                exchange = await self._forward(receive, send, "miss", lead)
                outcome = await self._store_response(cache_key, exchange)
            else:
                outcome = entry
        finally:
            lead.end(outcome)
        if entry is None:
            await exchange.deliver()
        else:
            await self._replay(entry, receive, send)

    async def _wait(self, waiting: asyncio.Future[Entry], receive: Receive) -> Entry:
        """Waits for an equal request's response.

        Raises Abandoned or NotCacheable if the future does, Refusal at the deadline, and
        ClientDisconnect.
        """
        disconnected = asyncio.ensure_future(body.wait_for_disconnect(receive))
        expired = self._deadline.expired
        try:
            await asyncio.wait(
                (waiting, disconnected, expired), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            disconnected.cancel()
        answered = waiting.done() and waiting.exception() is None
        # A response that arrives together with the deadline is still sent.
        if expired.done() and not answered:
            raise Refusal(504, "The request took longer than this server allows (timeout_s).")
        if waiting.done():
            return waiting.result()
        raise ClientDisconnect

    async def _replay(self, entry: Entry, receive: Receive, send: Send) -> None:
        answer = Response(entry.content, headers={"x-cache": "HIT"}, media_type=_MEDIA[entry.form])
        await answer(self._request.scope, receive, send)
        assert self._shared.cache is not None
        self._shared.cache.count("hit")

    async def _forward(
        self, receive: Receive, send: Send, result: str | None, lead: Lead | None = None
    ) -> Exchange:
        """Forwards the request to vLLM.

        Args:
            result: result of the response cache, "miss" or "bypass"; None without a cache.
            lead: passes the outcome on to equal requests; None: do not cache the response.
        """
        shared = self._shared
        if shared.cache is not None and result is not None:
            shared.cache.count(result)
        config = shared.config.response_cache
        exchange = Exchange(
            self._request.body,
            self._deadline,
            style=self._style,
            x_cache=None if result is None else result.upper(),
            record_bytes=config.max_answer_bytes if config and lead else 0,
            on_too_long=(lambda: lead.end(NotCacheable())) if lead else None,
        )
        await exchange.run(shared.app, self._request.scope, receive, send)
        if self._request.parsed.background:
            self._deadline.leave_running()
        return exchange

    async def _store_response(self, cache_key: str, exchange: Exchange) -> Entry | Exception:
        """Caches the response; returns what waiting requests get."""
        if not exchange.ended:
            return Abandoned()
        entry = exchange.entry()
        if entry is None or self._deadline.expired.done():
            return NotCacheable()
        if len(entry.content) < _SHORT:
            is_complete = complete.is_complete(self._style, entry)
        else:  # parsing takes milliseconds, which would delay other requests
            is_complete = await asyncio.to_thread(complete.is_complete, self._style, entry)
        if not is_complete:
            return NotCacheable()
        assert self._shared.cache is not None
        await self._shared.cache.keep(cache_key, entry, self._request.owner)
        return entry
