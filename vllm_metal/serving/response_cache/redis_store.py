# SPDX-License-Identifier: Apache-2.0
"""Answers in a Redis server, for several servers of one model."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from vllm_metal.serving.response_cache.store import StoreError
from vllm_metal.settings import local_network

#: Braces: in a cluster, all keys have to be in one slot for a script to use them.
_PREFIX = "{vllm-metal}:answers"
_WAIT_S = 0.25  # a slow answer is no better than none
#: Keeps a value, and makes room for it. The index has every key with its size, by the time of its
#: end; Redis removes values whose time is over by itself, so they leave the index first.
#: KEYS: the value's, the index, the total. ARGV: value, now and end in ms, size, most bytes, and
#: what values' keys begin with.
_PUT = """
local function forget(members)
    for _, member in ipairs(members) do
        local key, size = string.match(member, '^(%x+):(%d+)$')
        redis.call('ZREM', KEYS[2], member)
        redis.call('DEL', ARGV[6] .. ':' .. key)
        redis.call('DECRBY', KEYS[3], size)
    end
end
forget(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', ARGV[2]))
local old = redis.call('STRLEN', KEYS[1])
local name = string.match(KEYS[1], '(%x+)$')
if old > 0 and redis.call('ZREM', KEYS[2], name .. ':' .. old) == 1 then
    redis.call('DECRBY', KEYS[3], old)
end
local excess = redis.call('INCRBY', KEYS[3], ARGV[4]) - tonumber(ARGV[5])
while excess > 0 do
    local first = redis.call('ZRANGE', KEYS[2], 0, 0)
    if #first == 0 then break end
    excess = excess - tonumber(string.match(first[1], '(%d+)$'))
    forget(first)
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3] - ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], name .. ':' .. ARGV[4])
"""
_T = TypeVar("_T")


class RedisStore:
    """A store in a Redis server.

    The answers that end first make room, which are the oldest where all are kept equally long.
    """

    def __init__(
        self, url: str, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Connects when it is first needed.

        Args:
            url: redis://, rediss:// or unix://.
            max_bytes: of all values.
            ttl_s: seconds that an answer is kept.
            clock: seconds since 1970.
        """
        from redis import asyncio as client
        from redis.exceptions import RedisError

        self._failures = (RedisError, OSError, TimeoutError)
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._redis: Any = client.from_url(
            url, socket_timeout=_WAIT_S, socket_connect_timeout=_WAIT_S, retry_on_timeout=False
        )
        self._script = self._redis.register_script(_PUT)

    async def get(self, key: str) -> bytes | None:
        found = await self._asked(self._redis.get(f"{_PREFIX}:{key}"))
        return None if found is None else bytes(found)

    async def put(self, key: str, value: bytes) -> None:
        if not 0 < len(value) <= self._max_bytes:
            return
        now = int(self._clock() * 1000)
        keys = [f"{_PREFIX}:{key}", f"{_PREFIX}-index", f"{_PREFIX}-total"]
        end = now + max(int(self._ttl_s * 1000), 1)
        arguments: list[bytes | int | str] = [value, now, end, len(value), self._max_bytes, _PREFIX]
        await self._asked(self._script(keys=keys, args=arguments))

    async def num_bytes(self) -> int:
        return int(await self._asked(self._redis.get(f"{_PREFIX}-total")) or 0)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _asked(self, question: Awaitable[_T]) -> _T:
        try:
            return await question
        except self._failures as error:
            reasons = (type(error).__name__, local_network.advice(error))
            raise StoreError(f"Redis: {'. '.join(filter(None, reasons))}") from error
