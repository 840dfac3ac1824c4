# SPDX-License-Identifier: Apache-2.0
"""Reports of a miss in log, /metrics and response, and isolation of prompts."""

import pytest
from prometheus_client import CollectorRegistry
from prompt_shapes import PLAIN, SHAPES, decode, rendered

from vllm_metal.serving.metrics import ServerMetrics
from vllm_metal.serving.prefix_misses.watch import EXCHANGE, OWNERS, Exchange, Watch


@pytest.fixture
def metrics():
    return ServerMetrics(CollectorRegistry())


@pytest.fixture
def watch(metrics):
    return Watch(decode, metrics.lost_tokens, 16)


def ask(watch, messages, cached=0, salt=None):
    """Returns the report for a client's request."""
    exchange = Exchange()
    token = EXCHANGE.set(exchange)
    tokens = rendered(messages).tokens
    watch.on_first_token(watch.on_prompt(tokens, salt, messages), cached)
    EXCHANGE.reset(token)
    return exchange.miss


def lost(metrics, cause):
    return metrics.registry.get_sample_value(
        "vllm:prefix_cache_lost_tokens_total", {"cause": cause}
    )


def test_log_and_metrics_say_where_and_why_and_never_what(watch, metrics, caplog_vllm):
    shape = SHAPES["the day"]
    ask(watch, shape.before)
    miss = ask(watch, shape.now)
    assert (miss.cause, miss.before, miss.now) == ("date", "2026-11-25", "2026-11-26")
    assert lost(metrics, "date") == miss.lost
    said = [record.getMessage() for record in caplog_vllm.records]
    assert len(said) == 1
    assert "date, from token" in said[0]
    assert not any(text in said[0] for text in ("2026", "bakery", "flour"))


def test_one_owners_prompts_are_not_told_to_another(watch, metrics):
    ask(watch, PLAIN, salt="ours")
    miss = ask(watch, PLAIN, salt="theirs")
    assert miss.cause == "first_seen"
    assert (miss.token, miss.before, miss.now) == (None, "", "")
    assert lost(metrics, "other_salt") == miss.lost


def test_an_engine_with_blocks_of_its_own_tells_their_length_by_what_it_finds(metrics):
    watch = Watch(decode, metrics.lost_tokens, None)
    ask(watch, PLAIN)
    assert ask(watch, PLAIN, cached=512).cause == "granularity"


def test_memory_is_bounded_by_bytes_and_by_owners(metrics):
    watch = Watch(decode, metrics.lost_tokens, 16, prompts=4, most_bytes=40_000)
    for number in range(2 * OWNERS):
        watch.on_prompt(range(number, number + 1000), f"salt {number}")
        assert watch.nbytes <= 40_000
    for number in range(20):
        watch.on_prompt(range(number, number + 1000), "one")
        assert watch.nbytes <= 4 * 4000 + 40_000
    assert watch.nbytes <= 40_000
