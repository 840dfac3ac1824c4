# SPDX-License-Identifier: Apache-2.0
"""A Redis server that is stopped and started again while requests come in."""

import asyncio
import logging
import socket
import time

import pytest
from prometheus_client import CollectorRegistry
from redis_server import NO_REDIS, REDIS, redis_server
from serving_double import MODEL, App, ask, ready, text_of

from vllm_metal.serving.config import ResponseCacheConfig, ServingConfig
from vllm_metal.serving.gate import Tenants
from vllm_metal.serving.metrics import Figures


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
def test_no_request_fails_when_redis_stops_and_starts_under_load(tmp_path, caplog_vllm):
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    secret = tmp_path / "secret"
    secret.write_text("a secret of a test")
    secret.chmod(0o600)
    cache = ResponseCacheConfig(None, f"redis://127.0.0.1:{port}/0", secret=secret)
    marks = {"before": [], "while": [], "after": []}

    async def some(gate, when, count):
        """Requests of ten kinds, eight at a time."""
        limit = asyncio.Semaphore(8)

        async def one(number):
            prompt = [{"role": "user", "content": f"{number % 10}"}]
            fields = {"model": "m", "messages": prompt, "temperature": 0}
            async with limit:
                reply = await ask(gate, fields=fields)
            assert (reply.status, reply.text()) == (200, text_of(fields))
            marks[when].append(reply.x_cache)

        await asyncio.gather(*(one(number) for number in range(count)))

    async def scenario():
        skipped = 0.0
        config = ServingConfig(None, cache, None)

        def clock():
            return time.monotonic() + skipped

        gate = Tenants(App(), config, Figures(CollectorRegistry()), model=MODEL, clock=clock)
        with redis_server(port, tmp_path):
            await ready(gate)
            await some(gate, "before", 200)
            under_load = asyncio.create_task(some(gate, "while", 2000))
            await asyncio.sleep(0.02)
        await under_load
        await some(gate, "while", 100)
        skipped = 1.0  # the second in which it is left alone
        with redis_server(port, tmp_path):
            await some(gate, "after", 200)
        await gate.aclose()

    asyncio.run(scenario())
    assert marks["before"].count("HIT") > 150
    assert marks["after"].count("HIT") > 150
    assert marks["while"][-100:].count("MISS") > 0
    warnings = [r for r in caplog_vllm.records if r.levelno == logging.WARNING]
    assert 1 <= len(warnings) <= 2 and len({r.msg for r in warnings}) == len(warnings)
