# SPDX-License-Identifier: Apache-2.0
"""What /metrics says of tenants, kept answers and time limits. No key and no prompt is in it.

A new metric is a row of `Metric`; who knows its value counts by `figures.series(Metric.NAME)`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

#: The tenant of requests without a valid key.
NOBODY = "none"
#: How a request that generates ends: the engine has answered it, or a store has; its time limit was
#: over; its client went away; its answer is an error; its answer came, and the engine goes on.
Outcome = Literal["computed", "hit", "timed_out", "aborted", "error", "background"]
#: Upper bounds in seconds: from a kept answer to the longest that a whole context takes.
_BUCKETS = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)


@dataclass(frozen=True)
class _Row:
    """A metric as Prometheus's client makes it.

    known: values of the only label, whose series are there before the first request: a rate sees
    nothing of a series' first value.
    """

    name: str
    kind: type[Counter | Gauge | Histogram]
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


class Metric(Enum):
    """The metrics."""

    REQUESTS = _Row(
        "vllm:tenant_requests", Counter, "Requests by tenant and HTTP status.", ("tenant", "status")
    )
    TOKENS = _Row(
        "vllm:tenant_tokens",
        Counter,
        "Tokens that the engine computed or found for a tenant: of prompts (cached ones among "
        "them), found in the prefix cache, and of answers.",
        ("tenant", "kind"),
    )
    KEPT_ANSWERS = _Row(
        "vllm:response_cache_requests",
        Counter,
        "Requests by what the response cache did.",
        ("result",),
        known=("hit", "miss", "bypass"),
    )
    KEPT_BYTES = _Row(
        "vllm:response_cache_bytes",
        Gauge,
        "Bytes of all kept answers.",
        options={"multiprocess_mode": "mostrecent"},
    )
    TIMEOUTS = _Row("vllm:request_timeouts", Counter, "Requests that the time limit ended.")
    DURATIONS = _Row(
        "vllm:request_duration_seconds",
        Histogram,
        "From a request's last byte in to its answer's last byte out, by how it ended.",
        ("outcome",),
        known=get_args(Outcome),
        options={"buckets": _BUCKETS},
    )


class Figures:
    """The metrics, in a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Makes all of them in the registry."""
        self.registry = registry
        self._families: dict[Metric, Any] = {}
        for metric in Metric:
            row = metric.value
            family = row.kind(row.name, row.help, row.labels, registry=registry, **row.options)
            self._families[metric] = family
            for value in row.known:
                family.labels(value)

    def series(self, metric: Metric, **labels: str) -> Any:
        """The series to count in: a Counter, a Gauge or a Histogram, as the metric's row says."""
        family = self._families[metric]
        return family.labels(**labels) if labels else family


@functools.cache
def of_process() -> Figures:
    """Returns the figures that vLLM's /metrics shows; they are made after vLLM's, by the server."""
    return Figures(REGISTRY)
