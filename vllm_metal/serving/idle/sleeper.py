# SPDX-License-Identifier: Apache-2.0
"""Sleeper: puts an engine to sleep when no request has come for some time, wakes it for the next.

All of it runs on one event loop. What may happen at the same time is ordered by one lock, `_turn`:
who holds it changes whether the engine sleeps, and nobody else does.
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

_GIVEN_BACK = {1: "the KV pool is", 2: "the weights are"}


class SleepingEngine(Protocol):
    """What a sleeper asks of an engine."""

    async def is_stopped(self) -> bool:
        """Whether somebody else has paused it, or put it to sleep."""

    async def sleep(self, level: int) -> None:
        """Gives memory back: 1 the KV pool's; 2, from 1 on, the weights' as well."""

    async def wake_up(self) -> None:
        """Takes all of it again, and goes on with requests."""


class Sleeper:
    """Decides when one engine sleeps, unless its user does by calls of vLLM's."""

    def __init__(
        self,
        engine: SleepingEngine,
        spells: Sequence[IdlePeriod],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Awake, and not looking yet.

        Args:
            engine: is awake.
            spells: one after the other, by level.
            sleep: waits for seconds.
            clock: seconds; for the log.
        """
        self._engine, self._spells = engine, spells
        self._sleep, self._clock = sleep, clock
        self._turn = asyncio.Lock()
        self._level = 0  # at which the sleeper has put the engine to sleep; 0: it has not
        self._num_requests = 0  # that are being answered, or wait for the engine
        self._quiet = asyncio.Event()  # there are none
        self._quiet.set()
        self._came = asyncio.Event()  # a request, or a call, since the last spell began
        self._waking: asyncio.Task[Exception | None] | None = None
        self._watching: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begins to look whether the engine is idle; does nothing the second time."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    def close(self) -> None:
        """Looks no more."""
        if self._watching is not None and not (loop := self._watching.get_loop()).is_closed():
            loop.call_soon_threadsafe(self._watching.cancel)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """What surrounds a request in the engine.

        Raises:
            CannotWake: the engine sleeps, and cannot wake up.
        """
        self._num_requests += 1
        self._quiet.clear()
        self._came.set()
        try:
            while self._level or self._turn.locked():
                await self._awake()
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._quiet.set()

    async def sleep(self, call: Callable[[], Awaitable[None]], level: int) -> None:
        """Puts the engine to sleep as its user says: until the user wakes it up."""
        async with self._turn:
            if self._level and not level:  # a pause, which leaves memory as it is
                await self._engine.wake_up()
            elif level > self._level > 0:
                await self._engine.sleep(level)
            await call()
            self._level = 0  # its user's, from now on

    async def wake_up(self, call: Callable[[], Awaitable[bool]]) -> bool:
        """Wakes the engine up as its user says; returns whether all of it is awake."""
        async with self._turn:
            if awake := await call():
                self._level = 0
            self._came.set()  # the spells begin anew
            return awake

    async def _awake(self) -> None:
        """Waits for who holds the turn, and until the engine is awake.

        All that wait at one time share one attempt. Who goes meanwhile does not end it.
        """
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake())
        if (error := await asyncio.shield(self._waking)) is not None:
            raise error if isinstance(error, EngineDeadError) else CannotWake() from error

    async def _wake(self) -> Exception | None:
        """Wakes the engine up if it is the sleeper that let it sleep; returns what failed."""
        try:
            async with self._turn:
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
        with suppress(EngineDeadError, ReferenceError):  # the engine has ended
            while True:
                await self._quiet.wait()
                self._came.clear()
                if await self._pass_through():
                    await self._came.wait()

    async def _pass_through(self) -> bool:
        """Whether nothing came in all of the spells; after each the engine sleeps deeper."""
        for spell in self._spells:
            if not (await self._undisturbed(spell.seconds) and await self._fall(spell)):
                return False
        return True

    async def _undisturbed(self, seconds: float) -> bool:
        """Whether nothing comes for so long."""
        waits = [asyncio.ensure_future(wait) for wait in (self._came.wait(), self._sleep(seconds))]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._came.is_set()

    async def _fall(self, spell: IdlePeriod) -> bool:
        """Falls asleep; returns whether it did: a request, or the user, may have been first."""
        async with self._turn:
            if spell.level <= self._level:  # it did not wake up for the last request
                return True
            if not self._level and await self._engine.is_stopped():
                return False
            if self._came.is_set():
                return False
            self._level = spell.level  # whatever comes of it, the next request wakes the engine up
            try:
                await self._engine.sleep(spell.level)
            except EngineDeadError:
                raise
            except Exception as error:
                logger.error("The idle engine could not go to sleep: %s", error)
                return False
            logger.info("Idle: returned %s of memory", _GIVEN_BACK[spell.level])
            return True
