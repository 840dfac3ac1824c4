# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of tenants, kept answers and time limits. No key and no prompt is in it."""

from __future__ import annotations

import functools

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

#: The tenant of requests without a valid key.
NOBODY = "none"


class Figures:
    """The metrics, in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "vllm:tenant_requests",
            "Requests by tenant and HTTP status.",
            ("tenant", "status"),
            registry=registry,
        )
        self.tokens = Counter(
            "vllm:tenant_tokens",
            "Tokens that the engine computed or found for a tenant: of prompts (cached ones among "
            "them), found in the prefix cache, and of answers.",
            ("tenant", "kind"),
            registry=registry,
        )
        self.kept_answers = Counter(
            "vllm:response_cache_requests",
            "Requests by what the response cache did.",
            ("result",),
            registry=registry,
        )
        for result in ("hit", "miss", "bypass"):
            self.kept_answers.labels(result=result)
        self.kept_bytes = Gauge(
            "vllm:response_cache_bytes",
            "Bytes of all kept answers.",
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self.timeouts = Counter(
            "vllm:request_timeouts", "Requests that the time limit ended.", registry=registry
        )


@functools.cache
def of_process() -> Figures:
    """Those in the registry that vLLM's /metrics shows; made when the server is, after vLLM's."""
    return Figures(REGISTRY)
