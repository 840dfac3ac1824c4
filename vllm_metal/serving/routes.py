# SPDX-License-Identifier: Apache-2.0
"""The routes that tenants may use. All others are rejected.

An allowlist is needed: vLLM's own key check guards four path prefixes, and other routes reach the
engine, too (`/invocations`, `/generative_scoring`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: Key that a route requires: none, a tenant's, or one for /metrics.
RequiredKey = Literal["nothing", "tenant", "metrics"]
#: Format of a response: how it states its usage, and how its stream ends.
Style = Literal["chat", "completion", "messages", "responses"]


@dataclass(frozen=True)
class Route:
    """A route of vLLM's server."""

    method: str
    path: str  # "{id}" stands for a response's id
    required_key: RequiredKey = "tenant"
    body: bool = False  # whether it takes a JSON object
    style: Style | None = None  # None: it does not generate
    query: bool = False  # whether vLLM reads the query string
    pools: bool = False  # whether the engine embeds, scores or classifies

    @property
    def reaches_engine(self) -> bool:
        """Whether the engine computes tokens for this route."""
        return self.style is not None or self.pools


_RESPONSE = "/v1/responses/{id}"
ROUTES = (
    Route("GET", "/health", required_key="nothing"),
    Route("GET", "/metrics", required_key="metrics"),
    Route("GET", "/v1/models"),
    Route("POST", "/v1/chat/completions", body=True, style="chat"),
    Route("POST", "/v1/completions", body=True, style="completion"),
    Route("POST", "/v1/messages", body=True, style="messages"),
    Route("POST", "/v1/responses", body=True, style="responses"),
    Route("POST", "/v1/messages/count_tokens", body=True),
    *(
        Route("POST", path, body=True, pools=True)
        for path in (
            "/v1/embeddings",
            "/pooling",
            "/classify",
            "/score",
            "/v1/score",
            "/rerank",
            "/v1/rerank",
            "/v2/rerank",
        )
    ),
    Route("POST", "/tokenize", body=True),
    Route("POST", "/detokenize", body=True),
    Route("GET", _RESPONSE, query=True),
    Route("POST", f"{_RESPONSE}/cancel"),
)
_FIXED = {(route.method, route.path): route for route in ROUTES if "{" not in route.path}
_STORED = [
    (route, re.compile(route.path.replace("{id}", "([A-Za-z0-9_]{1,128})")))
    for route in ROUTES
    if "{" in route.path
]


@dataclass(frozen=True)
class Match:
    route: Route
    response_id: str | None = None  # in the path

    @property
    def path(self) -> str:
        return self.route.path.replace("{id}", self.response_id or "")


def find(method: str, path: str) -> Match | None:
    """Finds the route for an upper-case method and a decoded path without `root_path`, if any."""
    if route := _FIXED.get((method, path)):
        return Match(route)
    for route, pattern in _STORED:
        if route.method == method and (match := pattern.fullmatch(path)):
            return Match(route, match[1])
    return None
