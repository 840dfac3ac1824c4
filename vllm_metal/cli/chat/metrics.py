# SPDX-License-Identifier: Apache-2.0
"""Selects from a server's /metrics what the page plots: raw counters, nothing derived."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_NAMES = {
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generated_tokens",
}


@dataclass(frozen=True)
class MetricsSnapshot:
    """A server's metrics at one moment; None if not exported."""

    kv_cache_usage: float | None = None  # share of the pool, 0 to 1
    prefix_queries: float | None = None  # tokens since the server started, as all counters here
    prefix_hits: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    running: float | None = None  # requests
    waiting: float | None = None
    generated_tokens: float | None = None


def read(metrics: str) -> MetricsSnapshot:
    """Parses the text of /metrics; sums the samples of several engines."""
    # Most lines belong to histograms; parsing all of them would take a hundred times as long.
    wanted = "\n".join(line for line in metrics.splitlines() if line.startswith(tuple(_NAMES)))
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(f"{wanted}\n"):
        for sample in family.samples:
            if (name := _NAMES.get(sample.name)) is not None:
                sums[name] = sums.get(name, 0.0) + sample.value
    return MetricsSnapshot(**sums)
