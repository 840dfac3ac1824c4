# SPDX-License-Identifier: Apache-2.0
"""Metrics of tenants, the response cache and time limits; none has keys or prompts in it.

The code that knows a value updates the metric as an attribute of `ServerMetrics`.
"""

from __future__ import annotations

import functools
from typing import Literal, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

#: The tenant of requests without a valid key.
NO_TENANT = "none"
#: How a generation request ended, as its client saw it; "hit": from the response cache;
#: "background": the client has its response, and the engine continues.
Outcome = Literal["computed", "hit", "timed_out", "aborted", "error", "background"]
#: Upper bounds in seconds: from a cached response to the longest that a full context takes.
_BUCKETS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)


class ServerMetrics:
    """All metrics, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "vllm:tenant_requests",
            "Requests by tenant and HTTP status.",
            ("tenant", "status"),
            registry=registry,
        )
        self.tokens = Counter(
            "vllm:tenant_tokens",
            "Tokens of a tenant: prompt tokens (including cached ones), cached prompt "
            "tokens, and output tokens.",
            ("tenant", "kind"),
            registry=registry,
        )
        self.cache_requests = Counter(
            "vllm:response_cache_requests",
            "Requests by result of the response cache (hit, miss, bypass).",
            ("result",),
            registry=registry,
        )
        self.cache_bytes = Gauge(
            "vllm:response_cache_bytes",
            "Bytes of all cached responses.",
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self.timeouts = Counter(
            "vllm:request_timeouts", "Requests that the time limit ended.", registry=registry
        )
        self.durations = Histogram(
            "vllm:request_duration_seconds",
            "Seconds from a request's last byte received to its response's last byte sent, by "
            "outcome.",
            ("outcome",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.lost_tokens = Counter(
            "vllm:prefix_cache_lost_tokens",
            "Prompt tokens that missed the prefix cache although an earlier prompt had "
            "the same beginning or messages, by reason.",
            ("cause",),
            registry=registry,
        )
        # Created before the first request: Prometheus' rate() misses the step to a first value.
        for result in ("hit", "miss", "bypass"):
            self.cache_requests.labels(result)
        for outcome in get_args(Outcome):
            self.durations.labels(outcome)


@functools.cache
def of_process() -> ServerMetrics:
    """Returns the metrics in vLLM's /metrics; call it in the server, after vLLM's own exist."""
    return ServerMetrics(REGISTRY)
