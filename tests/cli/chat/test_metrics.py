# SPDX-License-Identifier: Apache-2.0
"""Plotted values, parsed from metrics in prometheus_client's format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_metal.cli.chat import metrics
from vllm_metal.cli.chat.metrics import MetricsSnapshot


def test_samples_of_several_engines_are_added_up():
    registry = CollectorRegistry()
    waiting = Gauge("vllm:num_requests_waiting", "", ["engine"], registry=registry)
    waiting.labels("0").set(2)
    waiting.labels("1").set(3)
    # Others, of which one begins alike.
    Gauge("vllm:num_requests_waiting_by_reason", "", registry=registry).set(9)
    Histogram("vllm:e2e_request_latency_seconds", "", registry=registry).observe(1)
    Counter("vllm:prefix_cache_hits", "", registry=registry).inc(64)
    found = metrics.read(generate_latest(registry).decode())
    assert found == MetricsSnapshot(waiting=5, prefix_hits=64)


def test_a_server_that_exports_nothing_has_no_metrics():
    assert metrics.read("") == MetricsSnapshot()
