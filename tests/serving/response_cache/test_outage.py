# SPDX-License-Identifier: Apache-2.0
"""A Redis server that is stopped and restarted while requests arrive."""

import asyncio
import logging

import pytest
from prometheus_client import CollectorRegistry
from redis_server import NO_REDIS, REDIS, held_port, redis_server
from serving_double import MODEL, App, ask, ready, text_of

from vllm_metal.serving.config import ResponseCacheConfig, ServingConfig
from vllm_metal.serving.gate import Tenants
from vllm_metal.serving.metrics import ServerMetrics


@pytest.mark.more
@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
def test_no_request_fails_when_redis_stops_and_starts_under_load(tmp_path, caplog_vllm, patient):
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    secret = tmp_path / "secret"
    secret.write_text("a secret of a test")
    secret.chmod(0o600)
    marks = {"before": [], "while": [], "after": []}

    async def some(gate, when, count):
        """Sends requests of ten kinds, eight at a time."""
        limit = asyncio.Semaphore(8)

        async def one(number):
            prompt = [{"role": "user", "content": f"{number % 10}"}]
            fields = {"model": "m", "messages": prompt, "temperature": 0}
            async with limit:
                reply = await ask(gate, fields=fields)
            assert (reply.status, reply.text()) == (200, text_of(fields))
            marks[when].append(reply.x_cache)

        await asyncio.gather(*(one(number) for number in range(count)))

    async def scenario(port):
        cache = ResponseCacheConfig(None, f"redis://127.0.0.1:{port}/0", secret=secret)
        now = [0.0]
        config, metrics = ServingConfig(None, cache, None), ServerMetrics(CollectorRegistry())
        gate = Tenants(App(), config, metrics, model=MODEL, clock=lambda: now[0])
        with redis_server(port, tmp_path):
            await ready(gate)
            await some(gate, "before", 200)
            under_load = asyncio.create_task(some(gate, "while", 2000))
            while len(marks["while"]) < 100:
                await asyncio.sleep(0.001)
        await under_load
        now[0] += 1.0  # the second in which it is left alone
        await some(gate, "while", 100)
        now[0] += 1.0
        with redis_server(port, tmp_path):
            await some(gate, "after", 200)
        await gate.aclose()

    with held_port() as port:
        asyncio.run(scenario(port))
    assert marks["before"].count("HIT") > 150
    assert marks["after"].count("HIT") > 150
    assert marks["while"][-100:].count("MISS") > 0
    warnings = [r for r in caplog_vllm.records if r.levelno == logging.WARNING]
    assert 1 <= len(warnings) <= 2 and len({r.msg for r in warnings}) == len(warnings)
