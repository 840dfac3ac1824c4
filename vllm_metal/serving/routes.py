# SPDX-License-Identifier: Apache-2.0
"""The routes that tenants may use, and what each takes. All others are refused.

vLLM's own check of keys guards four prefixes, and it has routes beside them that reach the engine
(`/invocations`, `/generative_scoring`). So a list of what is served is the safe one of the two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: What a route needs of a client: no key, one of a tenant, or one for /metrics.
Asks = Literal["nothing", "tenant", "metrics"]
#: How the usage of an answer is written, and how a stream ends.
Style = Literal["chat", "completion", "messages", "responses"]


@dataclass(frozen=True)
class Route:
    """One route."""

    method: str
    path: str  # as vLLM has it; "{id}" stands for a response's id
    asks: Asks = "tenant"
    body: bool = False  # whether it takes a JSON object
    style: Style | None = None  # of routes that generate; None: it generates nothing
    query: bool = False  # whether vLLM reads its query
    pools: bool = False  # whether the engine embeds, scores or classifies

    @property
    def reaches_engine(self) -> bool:
        """Whether the engine computes tokens for it."""
        return self.style is not None or self.pools


_RESPONSE = "/v1/responses/{id}"
ROUTES = (
    Route("GET", "/health", asks="nothing"),
    Route("GET", "/metrics", asks="metrics"),
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
    """A route, with what stands in its path."""

    route: Route
    response_id: str | None = None

    @property
    def path(self) -> str:
        return self.route.path.replace("{id}", self.response_id or "")


def find(method: str, path: str) -> Match | None:
    """The route of a request; None: it is not listed.

    Args:
        method: in capitals.
        path: decoded, without `root_path`.
    """
    if route := _FIXED.get((method, path)):
        return Match(route)
    for route, pattern in _STORED:
        if route.method == method and (match := pattern.fullmatch(path)):
            return Match(route, match[1])
    return None
