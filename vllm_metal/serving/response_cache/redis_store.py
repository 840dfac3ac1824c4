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
_CONNECT_S = 1.0  # once for many answers, of a loop that a herd keeps busy
#: Connections at most; who finds none free waits for one.
_CONNECTIONS, _QUEUE_S = 16, 5.0
#: Of both scripts. KEYS: the index, the total. The index has every key with its size and its owner,
#: by the time of its end. What somebody else has put in the place of either is removed.
_COMMON = """
local function only(name, kind)
    local found = redis.call('TYPE', name).ok
    if found == kind or found == 'none' then return end
    redis.call('DEL', name)
    if kind == 'zset' then redis.call('DEL', KEYS[2]) end
end
local function read(member)
    return string.match(member, '^(%x+):(%d+):(%w*)$')
end
local function forget(members, prefix)
    for _, member in ipairs(members) do
        local key, size = read(member)
        redis.call('ZREM', KEYS[1], member)
        if key then
            redis.call('DEL', prefix .. ':' .. key)
            redis.call('DECRBY', KEYS[2], size)
        end
    end
end
only(KEYS[1], 'zset')
only(KEYS[2], 'string')
if not string.match(redis.call('GET', KEYS[2]) or '0', '^%d+$') then
    local total = 0
    for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
        local _, size = read(member)
        total = total + tonumber(size or 0)
    end
    redis.call('SET', KEYS[2], total)
end
"""
#: Keeps a value, and makes room for it. Redis removes values whose time is over by itself, so they
#: leave the index first.
#: KEYS[3]: the value's. ARGV: value, now and end in ms, size, most bytes, what values' keys begin
#: with, the owner.
_PUT = (
    _COMMON
    + """
forget(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[2]), ARGV[6])
only(KEYS[3], 'string')
local name = string.match(KEYS[3], '(%x+)$')
local old = name .. ':' .. redis.call('STRLEN', KEYS[3]) .. ':' .. ARGV[7]
if redis.call('ZSCORE', KEYS[1], old) then forget({old}, ARGV[6]) end
local excess = redis.call('INCRBY', KEYS[2], ARGV[4]) - tonumber(ARGV[5])
while excess > 0 do
    local first = redis.call('ZRANGE', KEYS[1], 0, 0)
    if #first == 0 then
        redis.call('SET', KEYS[2], ARGV[4])
        break
    end
    local _, size = read(first[1])
    excess = excess - tonumber(size or 0)
    forget(first, ARGV[6])
end
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3] - ARGV[2])
local added = redis.call('ZADD', KEYS[1], ARGV[3], name .. ':' .. ARGV[4] .. ':' .. ARGV[7])
if added == 0 then redis.call('DECRBY', KEYS[2], ARGV[4]) end
"""
)
#: Removes an owner's values, or all. ARGV: what values' keys begin with, "owner" or "all", and the
#: owner.
_PURGE = (
    _COMMON
    + """
local gone = {}
for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    local _, _, owner = read(member)
    if ARGV[2] == 'all' or owner == ARGV[3] then table.insert(gone, member) end
end
forget(gone, ARGV[1])
return #gone
"""
)
#: The index, and the total.
_SHARED = [f"{_PREFIX}-index", f"{_PREFIX}-total"]
_T = TypeVar("_T")


class _OtherType(Exception):
    """Somebody else has put something of another type under a key."""


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
        pool = client.BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS,
            timeout=_QUEUE_S,
            socket_timeout=_WAIT_S,
            socket_connect_timeout=_CONNECT_S,
            retry_on_timeout=False,
        )
        self._redis: Any = client.Redis.from_pool(pool)
        self._put = self._redis.register_script(_PUT)
        self._purge = self._redis.register_script(_PURGE)

    async def get(self, key: str) -> bytes | None:
        try:
            found = await self._asked(self._redis.get(f"{_PREFIX}:{key}"))
        except _OtherType:
            return None
        return None if found is None else bytes(found)

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        if not 0 < len(value) <= self._max_bytes:
            return
        now = int(self._clock() * 1000)
        end = now + max(int(self._ttl_s * 1000), 1)
        arguments: list[bytes | int | str]
        arguments = [value, now, end, len(value), self._max_bytes, _PREFIX, owner]
        await self._asked(self._put(keys=[*_SHARED, f"{_PREFIX}:{key}"], args=arguments))

    async def purge(self, owner: str | None = None) -> int:
        arguments = [_PREFIX, "all" if owner is None else "owner", owner or ""]
        return int(await self._asked(self._purge(keys=_SHARED, args=arguments)))

    async def num_bytes(self) -> int:
        try:
            found = bytes(await self._asked(self._redis.get(_SHARED[1])) or b"0")
        except _OtherType:
            return 0
        return int(found) if found.isdigit() else 0  # the next `put` counts anew

    async def close(self) -> None:
        await self._redis.aclose()

    async def _asked(self, question: Awaitable[_T]) -> _T:
        try:
            return await question
        except self._failures as error:
            if str(error).startswith("WRONGTYPE"):
                raise _OtherType from error
            reasons = (type(error).__name__, local_network.advice(error))
            raise StoreError(f"Redis: {'. '.join(filter(None, reasons))}") from error
