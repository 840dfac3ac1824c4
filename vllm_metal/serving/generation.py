# SPDX-License-Identifier: Apache-2.0
"""Answers one request that generates: by a kept answer or the engine; decides its cache_salt."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_metal.patches.vllm_patches.image_names import set_owner
from vllm_metal.serving import body, fields, headers, response_ids
from vllm_metal.serving.config import ServingConfig
from vllm_metal.serving.deadline import Deadline, Sleep
from vllm_metal.serving.duration import Duration
from vllm_metal.serving.exchange import Exchange
from vllm_metal.serving.meter import Meter
from vllm_metal.serving.metrics import Figures
from vllm_metal.serving.refusal import Refusal
from vllm_metal.serving.response_cache import complete, key
from vllm_metal.serving.response_cache.cache import Abandoned, Lead, NotKept, ResponseCache
from vllm_metal.serving.response_cache.entry import Entry, Form
from vllm_metal.serving.response_cache.key import Render
from vllm_metal.serving.routes import Style
from vllm_metal.serving.tenants_file import Key
from vllm_metal.settings import salts

#: vLLM's own bounds of a salt (vllm/entrypoints/generate/base/protocol.py).
_MAX_SALT, _NOT_IN_SALTS = 128, frozenset("@/\\\0")
#: They name K/V of other engines, which are not kept apart by tenant.
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
_SHORT = 1 << 15  # bytes of an answer that are parsed in less time than another thread takes
_MEDIA: dict[Form, str] = {"whole": "application/json", "stream": "text/event-stream"}


@dataclass
class Shared:
    """What all requests of a server share."""

    app: ASGIApp  # vLLM's
    config: ServingConfig
    figures: Figures
    sleep: Sleep
    secret: bytes = b""  # b"" where there are no tenants
    meter: Meter | None = None  # None: there are no tenants
    cache: ResponseCache | None = None
    model: str | None = None  # the fingerprint; None: not known yet, or it cannot be
    render: Callable[[Any], Render] | None = None  # of the application's state


@dataclass(frozen=True)
class ClientRequest:
    """Who asks for what."""

    style: Style
    key: Key | None  # None: there are no tenants
    fields: dict[str, Any]  # of the body, as the client sent them
    fresh: bool  # whether the client does not want a kept answer

    @property
    def owner(self) -> str:
        """Whose the kept answers are; "" where there are no tenants."""
        return "" if self.key is None else self.key.tenant

    @property
    def identity(self) -> str:
        """What tells a tenant from all others that there ever were; "" where there are none."""
        return "" if self.key is None else self.key.identity


class Generation:
    """One request, from its parsed body to the end of its answer."""

    def __init__(self, shared: Shared, request: ClientRequest, scope: Scope) -> None:
        """Makes what vLLM gets.

        Args:
            shared: of the server.
            request: of a client.
            scope: for vLLM, but for the body's headers.

        Raises:
            Refusal: a field of the body may not be what it is.
        """
        self._shared, self._request, self._scope = shared, request, scope
        self._id = secrets.token_hex(16)
        self._read = fields.read(request.style, request.fields)
        most = shared.config.body.max_body_choices
        if self._read.choices > most:
            raise Refusal(400, f"The body asks for more than {most} choices (max_body_choices).")
        self._deadline = Deadline(shared.config.timeout_s, shared.sleep)
        outgoing = dict(request.fields)
        if request.key is not None:
            self._keep_apart(outgoing, request.key)
        outgoing.pop("request_id", None)
        if request.style == "responses":
            outgoing["request_id"] = self._response_id()
        self._body = body.write(outgoing)

    async def run(self, receive: Receive, send: Send) -> None:
        """Answers the client."""
        engine = self._scope["app"].state.engine_client
        watched = Duration(self._shared.figures, receive, send)
        receive, send = watched.receive, watched.send
        self._deadline.start(self._id, engine, self._shared.figures.timeouts.inc)
        try:
            found = await self._key()
            if found is None:
                result = None if self._shared.cache is None else "bypass"
                await self._ask(receive, send, result)
            else:
                await self._answer_or_wait(found, receive, send)
        finally:
            self._deadline.end()
            watched.end(self._deadline.expired.done(), self._read.background)

    def _keep_apart(self, outgoing: dict[str, Any], key: Key) -> None:
        """Writes the tenant's salt, and refuses what would reach another's."""
        secret = self._shared.secret
        more = outgoing.get("vllm_xargs")  # vLLM reads both from there, too
        for name in _TRANSFERS:
            if outgoing.pop(name, None) is not None or (isinstance(more, dict) and name in more):
                raise Refusal(400, f"{name!r} is not for tenants.")
        earlier = outgoing.get("previous_response_id")
        if earlier is not None and not (
            isinstance(earlier, str) and response_ids.belongs(secret, key.identity, earlier)
        ):
            raise Refusal(404, "There is no response with the id in 'previous_response_id'.")
        salt = salts.derive(secret, key.identity, client_salt(outgoing))
        outgoing["cache_salt"] = salt
        set_owner(salt)
        if self._shared.meter is not None:
            self._shared.meter.introduce(key, salt)

    def _response_id(self) -> str:
        """What vLLM names a response, and what the deadline finds it by."""
        if self._request.key is None:
            return f"resp_{self._id}"
        made = response_ids.make(self._shared.secret, self._request.identity)
        self._id = made.removeprefix("resp_")
        return made

    async def _key(self) -> str | None:
        """Returns the key of the kept answer; None: none is to be used, nor kept."""
        shared, request = self._shared, self._request
        if shared.cache is None or shared.render is None or shared.model is None or request.fresh:
            return None
        if not self._read.repeatable:
            return None
        render = shared.render(self._scope["app"].state)
        return await key.of_request(
            request.style, request.fields, self._read, request.identity, shared.model, render
        )

    async def _answer_or_wait(self, found: str, receive: Receive, send: Send) -> None:
        """Looks the answer up, waits for a twin's, or asks, for others too."""
        cache = self._shared.cache
        assert cache is not None
        while (waiting := cache.coalesced.join(found)) is not None:
            try:
                await self._replay(await self._wait(waiting, receive), receive, send)
            except Abandoned:
                continue
            except NotKept:
                await self._ask(receive, send, "miss")
            return
        lead = cache.coalesced.lead(found)
        outcome: Entry | Exception = Abandoned()
        try:
            kept = await cache.get(found, self._request.owner)
            if kept is None:
                exchange = await self._ask(receive, send, "miss", lead)
                outcome = await self._kept(found, exchange)
            else:
                outcome = kept
        finally:
            lead.end(outcome)
        if kept is None:
            await exchange.deliver()
        else:
            await self._replay(kept, receive, send)

    async def _wait(self, waiting: asyncio.Future[Entry], receive: Receive) -> Entry:
        """A twin's answer.

        Raises:
            Abandoned, NotKept: as the future.
            Refusal: the time is up.
            ClientDisconnect: the client has gone.
        """
        gone = asyncio.ensure_future(body.until_gone(receive))
        late = self._deadline.expired
        try:
            await asyncio.wait((waiting, gone, late), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        answered = waiting.done() and waiting.exception() is None
        if late.done() and not answered:
            raise Refusal(504, "The request took longer than this server allows (timeout_s).")
        if waiting.done():
            return waiting.result()
        raise ClientDisconnect

    async def _replay(self, entry: Entry, receive: Receive, send: Send) -> None:
        """Sends a kept answer."""
        answer = Response(entry.content, headers={"x-cache": "HIT"}, media_type=_MEDIA[entry.form])
        await answer(self._scope, receive, send)
        assert self._shared.cache is not None
        self._shared.cache.count("hit")

    async def _ask(
        self, receive: Receive, send: Send, result: str | None, lead: Lead | None = None
    ) -> Exchange:
        """Has vLLM answer.

        Args:
            receive: of the client.
            send: of the client.
            result: of the response cache, "miss" or "bypass"; None: there is no cache.
            lead: of those who wait for the answer; None: nobody does, and it is not kept.
        """
        shared = self._shared
        if shared.cache is not None and result is not None:
            shared.cache.count(result)
        config = shared.config.response_cache
        exchange = Exchange(
            self._body,
            self._deadline,
            style=self._request.style,
            x_cache=None if result is None else result.upper(),
            record_bytes=config.max_answer_bytes if config and lead else 0,
            on_too_long=(lambda: lead.end(NotKept())) if lead else None,
        )
        sent = headers.with_body(self._scope["headers"], len(self._body))
        sent.append((b"x-request-id", self._id.encode()))
        await exchange.run(shared.app, {**self._scope, "headers": sent}, receive, send)
        if self._read.background:
            self._deadline.leave_running()
        return exchange

    async def _kept(self, found: str, exchange: Exchange) -> Entry | Exception:
        """Keeps the answer; returns what twins get."""
        if not exchange.ended:
            return Abandoned()
        entry = exchange.entry()
        if entry is None or self._deadline.expired.done():
            return NotKept()
        if len(entry.content) < _SHORT:
            whole = complete.is_complete(self._request.style, entry)
        else:  # it takes milliseconds, in which other requests are served
            whole = await asyncio.to_thread(complete.is_complete, self._request.style, entry)
        if not whole:
            return NotKept()
        assert self._shared.cache is not None
        await self._shared.cache.keep(found, entry, self._request.owner)
        return entry


def client_salt(fields: dict[str, Any]) -> str:
    """The salt that a client sent; "" for none.

    Raises:
        Refusal: vLLM would refuse it, or it looks like one of the server's.
    """
    salt = fields.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 0 < len(salt) <= _MAX_SALT or _NOT_IN_SALTS & set(salt):
        raise Refusal(
            400, f"'cache_salt' must be 1 to {_MAX_SALT} characters, without @, / and \\."
        )
    if salt.startswith("vm1-"):
        raise Refusal(400, "'cache_salt' may not begin with 'vm1-', as the server's own do.")
    return salt
