# SPDX-License-Identifier: Apache-2.0
"""Sleeper: puts an idle engine to sleep, and wakes it up for the next request.

It runs on one event loop. Only the holder of the lock `_lock` changes whether the engine sleeps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from vllm.logger import init_logger
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_metal.serving.idle.idle_period import IdlePeriod
from vllm_metal.serving.idle.unavailable import CannotWake

logger = init_logger(__name__)

_FREED = {1: "the KV pool", 2: "the weights"}


class SleepingEngine(Protocol):
    """The operations of an engine that a Sleeper needs."""

    async def is_stopped(self) -> bool:
        """Returns whether the engine was paused or put to sleep by other means than `sleep`."""

    async def sleep(self, level: int) -> None:
        """Frees the KV pool's memory at level 1, and the weights' at level 2, after level 1."""

    async def wake_up(self) -> None:
        """Allocates all memory again, and resumes requests."""


class Sleeper:
    """Puts one engine to sleep when it is idle, unless the user paused it or put it to sleep."""

    def __init__(
        self,
        engine: SleepingEngine,
        idle_periods: Sequence[IdlePeriod],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_periods`: idle periods in order of their levels; `clock`: returns seconds."""
        self._engine, self._periods = engine, idle_periods
        self._sleep, self._clock = sleep, clock
        self._lock = asyncio.Lock()
        self._level = 0  # sleep level set by the sleeper; 0 if awake, or put to sleep by the user
        self._num_requests = 0  # running, or waiting for the engine
        self._idle = asyncio.Event()  # set while there are no requests
        self._idle.set()
        self._activity = asyncio.Event()  # a request or call came since the last period began
        self._waking: asyncio.Task[Exception | None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts watching for idleness; a second call does nothing."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Stops watching; callable from any thread."""
        if self._watching is not None and not (loop := self._watching.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._watching.cancel)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Keeps the engine awake around one request; raises CannotWake if it cannot wake up."""
        self._num_requests += 1
        self._idle.clear()
        self._activity.set()
        try:
            while self._level or self._lock.locked():
                await self._ensure_awake()
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    async def sleep(self, call: Callable[[], Awaitable[None]], level: int) -> None:
        """Awaits the user's sleep or (level 0) pause call, which only the user can undo."""
        async with self._lock:
            if self._level and not level:  # a pause, which must leave the engine with its memory
                await self._engine.wake_up()
            elif level > self._level > 0:
                await self._engine.sleep(level)
            await call()
            self._level = 0  # the user controls it from now on

    async def wake_up(self, call: Callable[[], Awaitable[bool]]) -> bool:
        """Awaits the user's wake-up call; returns whether the whole engine is awake."""
        async with self._lock:
            if awake := await call():
                self._level = 0
            self._activity.set()  # restarts the idle periods
            return awake

    async def _ensure_awake(self) -> None:
        """Wakes the engine if the sleeper put it to sleep; raises if it cannot wake up."""
        # All waiting requests share one attempt, and it is shielded from a cancelled one.
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake())
        if (error := await asyncio.shield(self._waking)) is not None:
            raise error if isinstance(error, EngineDeadError) else CannotWake() from error

    async def _wake(self) -> Exception | None:
        """Wakes the engine up if the sleeper put it to sleep; returns the error, if any."""
        try:
            async with self._lock:
                if self._level:
                    began = self._clock()
                    await self._engine.wake_up()
                    self._level = 0
                    logger.info("Awake for a request, after %.1f s", self._clock() - began)
        except Exception as error:
            logger.error("The engine could not wake up: %s", error)
            return error
        finally:
            self._waking = None
        return None

    async def _watch(self) -> None:
        with suppress(EngineDeadError, ReferenceError):  # both mean that the engine has ended
            while True:
                await self._idle.wait()
                self._activity.clear()
                if await self._sleep_in_steps():
                    await self._activity.wait()

    async def _sleep_in_steps(self) -> bool:
        """Sleeps deeper after each idle period; returns False if activity ends one of them."""
        for period in self._periods:
            if not (await self._is_idle_for(period.seconds) and await self._fall_asleep(period)):
                return False
        return True

    async def _is_idle_for(self, seconds: float) -> bool:
        waits = [
            asyncio.ensure_future(wait) for wait in (self._activity.wait(), self._sleep(seconds))
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._activity.is_set()

    async def _fall_asleep(self, period: IdlePeriod) -> bool:
        """Puts the engine to sleep; returns False if a request or the user came first."""
        async with self._lock:
            if period.level <= self._level:  # it did not wake up for the last request
                return True
            if not self._level and await self._engine.is_stopped():
                return False
            # Checked after the await above, during which a request may have come.
            if self._activity.is_set():
                return False
            # Set before the attempt: if it fails halfway, the next request still wakes the engine.
            self._level = period.level
            try:
                await self._engine.sleep(period.level)
            except EngineDeadError:
                raise
            except Exception as error:
                logger.error("The idle engine could not go to sleep: %s", error)
                return False
            logger.info("Idle: freed %s", _FREED[period.level])
            return True
