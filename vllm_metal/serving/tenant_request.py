# SPDX-License-Identifier: Apache-2.0
"""TenantRequest: a request with a body, read and checked once, and rewritten for vLLM."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope

from vllm_metal.patches.vllm_patches.image_names import set_owner
from vllm_metal.serving import body, fields, headers, media, response_ids
from vllm_metal.serving.config import ServingConfig
from vllm_metal.serving.deadline import Sleep
from vllm_metal.serving.fields import Fields
from vllm_metal.serving.headers import Headers
from vllm_metal.serving.meter import Meter
from vllm_metal.serving.metrics import ServerMetrics
from vllm_metal.serving.refusal import Refusal
from vllm_metal.serving.response_cache.cache import ResponseCache
from vllm_metal.serving.response_cache.key import Render
from vllm_metal.serving.routes import Route
from vllm_metal.serving.tenants_file import Key
from vllm_metal.settings import salts

#: vLLM's own limits for salts (vllm/entrypoints/generate/base/protocol.py).
_MAX_SALT, _NOT_IN_SALTS = 128, frozenset("@/\\\0")
#: Fields that name K/V of other engines, which are not separated by tenant.
_TRANSFERS = ("kv_transfer_params", "ec_transfer_params")


@dataclass
class Shared:
    """State that all requests of a server share."""

    app: ASGIApp  # vLLM's
    config: ServingConfig
    metrics: ServerMetrics
    sleep: Sleep
    secret: bytes = b""  # b"" without tenants
    meter: Meter | None = None  # None without tenants
    cache: ResponseCache | None = None
    model: str | None = None  # fingerprint; None until it is known
    render: Callable[[Any], Render] | None = None  # takes vLLM's application state


@dataclass(frozen=True)
class TenantRequest:
    """A checked request: its key, what the client sent, and what to pass to vLLM.

    Without tenants, only generation requests become a TenantRequest, and `key` is None.
    """

    route: Route
    key: Key | None
    fields: dict[str, Any]  # the client's body
    parsed: Fields  # parsed from it as vLLM does
    fresh: bool  # whether the client rejects cached responses
    request_id: str  # the server's; every id that the engine gives the request contains it
    body: bytes  # for vLLM
    scope: Scope  # for vLLM, with the headers of that body

    @property
    def owner(self) -> str:
        """Owner of the request's cached responses; "" without tenants."""
        return "" if self.key is None else self.key.tenant

    @property
    def identity(self) -> str:
        """Identity of the request's tenant, never reused for another; "" without tenants."""
        return "" if self.key is None else self.key.identity


async def read(
    shared: Shared, route: Route, key: Key | None, sent: Headers, scope: Scope, receive: Receive
) -> TenantRequest:
    """Reads a request's body, and isolates the request from other tenants.

    Args:
        route: a route that takes a body.
        key: the client's key; None without tenants.
        sent: the client's headers.
        scope: scope to pass to vLLM, with the headers that vLLM may see.

    Raises:
        Refusal: the body is invalid or not allowed.
        ClientDisconnect: the client left before the end of the body.
    """
    if sent.body is not None:
        raise sent.body
    limits = shared.config.body
    found = body.parse(await body.read(receive, limits, sent.length), limits)
    if key is not None:
        media.check(found)
    parsed = Fields() if route.style is None else fields.read(route.style, found)
    if parsed.choices > limits.max_body_choices:
        most = limits.max_body_choices
        raise Refusal(400, f"The body asks for more than {most} choices (max_body_choices).")
    outgoing = dict(found)
    if key is not None:
        _isolate(shared, route, key, outgoing)
    outgoing.pop("request_id", None)
    request_id = secrets.token_hex(16)
    if route.style == "responses":  # vLLM stores the response under this id
        if key is not None:
            request_id = response_ids.make(shared.secret, key.identity).removeprefix("resp_")
        outgoing["request_id"] = f"resp_{request_id}"
    written = body.write(outgoing)
    forwarded = headers.with_body(scope["headers"], len(written))
    if route.style is not None:
        forwarded.append((b"x-request-id", request_id.encode()))
    scope = {**scope, "headers": forwarded}
    return TenantRequest(route, key, found, parsed, sent.fresh, request_id, written, scope)


def _isolate(shared: Shared, route: Route, key: Key, outgoing: dict[str, Any]) -> None:
    """Replaces the client's salt by one of its tenant, which also owns images and token counts.

    Raises Refusal if the request refers to data of other tenants, or its salt is invalid.
    """
    if route.style is not None:
        _check_references(shared.secret, key, outgoing)
    salt = salts.derive(shared.secret, key.identity, _client_salt(outgoing))
    set_owner(salt)
    outgoing.pop("cache_salt", None)
    if route.reaches_engine:
        outgoing["cache_salt"] = salt
        if shared.meter is not None:
            shared.meter.introduce(key, salt)


def _check_references(secret: bytes, key: Key, outgoing: dict[str, Any]) -> None:
    """Rejects references to K/V of other engines, and to responses of other tenants."""
    more = outgoing.get("vllm_xargs")  # vLLM reads both from there, too
    for name in _TRANSFERS:
        if outgoing.pop(name, None) is not None or (isinstance(more, dict) and name in more):
            raise Refusal(400, f"{name!r} is not supported for tenants. Leave it out.")
    earlier = outgoing.get("previous_response_id")
    if earlier is not None and not (
        isinstance(earlier, str) and response_ids.belongs(secret, key.identity, earlier)
    ):
        raise Refusal(404, "There is no response with the id in 'previous_response_id'.")


def _client_salt(outgoing: dict[str, Any]) -> str:
    """Returns the client's salt, "" for none.

    Raises Refusal if vLLM would reject the salt, or it looks like one that the server derived.
    """
    salt = outgoing.get("cache_salt")
    if salt is None:
        return ""
    if not isinstance(salt, str) or not 0 < len(salt) <= _MAX_SALT or _NOT_IN_SALTS & set(salt):
        raise Refusal(
            400, f"'cache_salt' must be 1 to {_MAX_SALT} characters, without @, / and \\."
        )
    if salt.startswith("vm1-"):
        raise Refusal(
            400, "'cache_salt' may not begin with 'vm1-': the server reserves this prefix."
        )
    return salt
