# SPDX-License-Identifier: Apache-2.0
"""Stores cached responses in Redis, for several servers of one model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from vllm_metal.serving.response_cache.store import StoreError
from vllm_metal.settings import local_network

#: The braces put all keys in one slot of a cluster, which scripts with several keys require.
_PREFIX = "{vllm-metal}:answers"
#: Timeout of a reply. It includes waits for this process's event loop, busy under many requests.
WAIT_S = 1.0
CONNECT_S = 1.0  # timeout of a connection, which serves many replies
#: Most connections, and the wait for a free one.
_CONNECTIONS, _QUEUE_S = 16, 5.0
BATCH = 1000  # values removed per command, which blocks other clients for milliseconds
#: Start of both scripts. KEYS: the index, the total. ARGV[1]: prefix of the values' keys. The index
#: is a sorted set of each value's key, size and owner, by expiry. Keys of another type, which
#: somebody else wrote, are removed. Lua's numbers are exact to 15 digits.
_COMMON = """
local function only(name, kind)
    local found = redis.call('TYPE', name).ok
    if found == kind or found == 'none' then return end
    redis.call('DEL', name)
    if kind == 'zset' then redis.call('DEL', KEYS[2]) end
end
local function read(member)
    local key, size, owner = string.match(member, '^(%x+):(%d+):([^:]*)$')
    if key and #size <= 15 then return key, size, owner end
end
local function forget(members)
    for _, member in ipairs(members) do
        local key, size, owner = read(member)
        redis.call('ZREM', KEYS[1], member)
        if key then
            redis.call('DEL', ARGV[1] .. ':' .. owner .. ':' .. key)
            redis.call('DECRBY', KEYS[2], size)
        end
    end
end
only(KEYS[1], 'zset')
only(KEYS[2], 'string')
local known = redis.call('GET', KEYS[2]) or '0'
if not string.match(known, '^%d+$') or #known > 15 then
    local total = 0
    for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
        local _, size = read(member)
        total = total + tonumber(size or 0)
    end
    redis.call('SET', KEYS[2], total)
end
"""
#: Stores a value and evicts others. Redis itself removes expired values, so their index entries are
#: removed first.
#: KEYS[3]: the value's key. ARGV[2] to [7]: value, now and expiry in ms, size, most bytes, owner.
_PUT = (
    _COMMON
    + """
forget(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[3], 'LIMIT', 0, 1000))
only(KEYS[3], 'string')
local name = string.match(KEYS[3], '(%x+)$')
local old = name .. ':' .. redis.call('STRLEN', KEYS[3]) .. ':' .. ARGV[7]
if redis.call('ZSCORE', KEYS[1], old) then forget({old}) end
local excess = redis.call('INCRBY', KEYS[2], ARGV[5]) - tonumber(ARGV[6])
while excess > 0 do
    local first = redis.call('ZRANGE', KEYS[1], 0, 0)
    if #first == 0 then
        redis.call('SET', KEYS[2], ARGV[5])
        break
    end
    local _, size = read(first[1])
    excess = excess - tonumber(size or 0)
    forget(first)
end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[4] - ARGV[3])
local added = redis.call('ZADD', KEYS[1], ARGV[4], name .. ':' .. ARGV[5] .. ':' .. ARGV[7])
if added == 0 then redis.call('DECRBY', KEYS[2], ARGV[5]) end
"""
)
#: Removes the members ARGV[2] and following from the index.
_FORGET = (
    _COMMON
    + """
local gone = {}
for place = 2, #ARGV do table.insert(gone, ARGV[place]) end
forget(gone)
if redis.call('ZCARD', KEYS[1]) == 0 then redis.call('SET', KEYS[2], 0) end
"""
)
#: Keys of the index and the total.
_SHARED = [f"{_PREFIX}-index", f"{_PREFIX}-total"]
_T = TypeVar("_T")


class _OtherType(Exception):
    """A key has a value of another type, which this store did not write."""


class RedisStore:
    """A store in a Redis server. Evicts what expires first: the oldest, as TTLs are equal."""

    def __init__(
        self, url: str, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Connects on first use to `url`, a redis://, rediss:// or unix:// address.

        `max_bytes` limits all values together; `clock` returns seconds since 1970.
        """
        from redis import asyncio as client
        from redis.exceptions import RedisError

        self._failures = (RedisError, OSError, TimeoutError)
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        pool = client.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=_QUEUE_S,
            socket_timeout=WAIT_S,
            socket_connect_timeout=CONNECT_S,
            retry_on_timeout=False,
        )
        self._redis: Any = client.Redis.from_pool(pool)
        self._put = self._redis.register_script(_PUT)
        self._forget = self._redis.register_script(_FORGET)

    async def get(self, key: str, owner: str = "") -> bytes | None:
        try:
            found = await self._call(self._redis.get(f"{_PREFIX}:{owner}:{key}"))
        except _OtherType:
            return None
        return None if found is None else bytes(found)

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        if not 0 < len(value) <= self._max_bytes:
            return
        now = int(self._clock() * 1000)
        end = now + max(int(self._ttl_s * 1000), 1)
        arguments: list[bytes | int | str]
        arguments = [_PREFIX, value, now, end, len(value), self._max_bytes, owner]
        await self._call(self._put(keys=[*_SHARED, f"{_PREFIX}:{owner}:{key}"], args=arguments))

    async def purge(self, owner: str | None = None) -> int:
        # Values first, even those missing in the index, so that no server finds them any more.
        number = 0
        await self._call(self._forget(keys=_SHARED, args=[_PREFIX]))
        owners = "*" if owner is None else owner
        values = {"match": f"{_PREFIX}:{owners}:*", "count": BATCH}
        async for found in self._scan(lambda cursor: self._redis.scan(cursor, **values)):
            number += await self._call(self._redis.unlink(*found))
        index = {"match": None if owner is None else f"*:{owner}", "count": BATCH}
        async for found in self._scan(
            lambda cursor: self._redis.zscan(_SHARED[0], cursor, **index)
        ):
            members = [member for member, _ in found]
            await self._call(self._forget(keys=_SHARED, args=[_PREFIX, *members]))
        return number

    async def num_bytes(self) -> int:
        try:
            found = bytes(await self._call(self._redis.get(_SHARED[1])) or b"0")
        except _OtherType:
            return 0
        return int(found) if found.isdigit() else 0  # the next `put` recounts

    async def close(self) -> None:
        await self._redis.aclose()

    async def _scan(
        self, command: Callable[[int], Awaitable[tuple[int, list[Any]]]]
    ) -> AsyncIterator[list[Any]]:
        cursor = 0
        while True:
            cursor, found = await self._call(command(cursor))
            if found:
                yield found
            if cursor == 0:
                return

    async def _call(self, operation: Awaitable[_T]) -> _T:
        try:
            return await operation
        except self._failures as error:
            if str(error).startswith("WRONGTYPE"):
                raise _OtherType from error
            reasons = (type(error).__name__, local_network.advice(error))
            raise StoreError(f"Redis: {'. '.join(filter(None, reasons))}") from error
