# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake-up times of an engine, on a fake with slow sleep."""

import asyncio
from contextlib import suppress

import pytest
import virtual_time
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_metal.serving.idle.idle_period import IdlePeriod
from vllm_metal.serving.idle.sleeper import Sleeper
from vllm_metal.serving.idle.unavailable import EXCHANGE, CannotWake, Exchange

SPELLS = [
    IdlePeriod(10.0, level=1),
    IdlePeriod(20.0, level=2),
]  # the second 30 s after the last request
#: Seconds that the double takes.
FALLS, WAKES = 3.0, 2.0


class Engine:
    """Sleeps and wakes like vLLM's engine, and records impossible requests."""

    def __init__(self):
        self.level, self.moving, self.users = 0, False, False
        self.inside = 0  # requests that compute
        self.wrong = []  # a sleeper logs what an engine raises, and goes on
        self.history = []  # (time, what was done)
        self.broken_until = 0.0  # no waking up before
        self.error = RuntimeError("no memory")

    async def _move(self, what, seconds):
        if self.moving:
            self.wrong.append(f"{what} while it changes")
        self.moving = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self.moving = False
        self.history.append((asyncio.get_running_loop().time(), what))

    async def is_stopped(self):
        await asyncio.sleep(0.1)
        return self.users

    async def sleep(self, level):
        if self.inside or level != self.level + 1:
            self.wrong.append(f"sleep {level} at {self.level} with {self.inside} requests")
        await self._move(f"sleep {level}", FALLS)
        self.level = level

    async def wake_up(self):
        await self._move("wake", WAKES)
        if asyncio.get_running_loop().time() < self.broken_until:
            raise self.error
        self.level = 0

    async def users_sleep(self):
        await self._move("user's sleep", FALLS)
        self.users = True

    async def users_wake(self):
        await self._move("user's wake", WAKES)
        self.users, self.level = False, 0
        return True

    async def compute(self, seconds):
        """Computes a request; vLLM makes it wait if a user put the engine to sleep."""
        if not self.users and (self.level or self.moving):
            self.wrong.append(f"a request at {self.level}")
        self.inside += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.inside -= 1


def play(script, idle_periods=SPELLS):
    """Runs `script(sleeper, engine)` beside a sleeper's watch."""

    async def main():
        engine = Engine()
        sleeper = Sleeper(engine, idle_periods)
        sleeper.begin()
        await script(sleeper, engine)
        sleeper.close()
        assert engine.wrong == []
        return engine.history

    return virtual_time.run(main())


async def ask(sleeper, engine, seconds=1.0):
    """Sends a request; returns how long it waited for the engine."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with sleeper.request():
        waited = loop.time() - began
        await engine.compute(seconds)
    return waited


def test_an_idle_engine_gives_the_pool_back_and_then_the_weights():
    history = play(lambda sleeper, engine: asyncio.sleep(100))
    assert [(round(at), what) for at, what in history] == [(13, "sleep 1"), (36, "sleep 2")]


def test_without_a_second_spell_the_weights_stay():
    history = play(lambda sleeper, engine: asyncio.sleep(1000), SPELLS[:1])
    assert [what for _, what in history] == ["sleep 1"]


def test_a_spell_counts_from_the_end_of_the_last_request():
    async def script(sleeper, engine):
        await asyncio.sleep(8)
        assert await ask(sleeper, engine, seconds=40) == 0
        await asyncio.sleep(9)
        assert engine.history == []
        await asyncio.sleep(5)
        assert engine.level == 1

    play(script)


def test_the_next_request_waits_and_is_answered():
    async def script(sleeper, engine):
        for pause in (20, 50, 20):
            await asyncio.sleep(pause)
            assert engine.level == (2 if pause == 50 else 1)
            assert await ask(sleeper, engine) == WAKES
            assert await ask(sleeper, engine) == 0

    play(script)


def test_requests_that_come_while_it_falls_asleep_are_answered():
    async def script(sleeper, engine):
        for late in (9.99, 10.0, 10.05, 10.1, 10.11, 11.5, 13.09, 13.11):
            await asyncio.sleep(late)
            waited = await asyncio.gather(*(ask(sleeper, engine) for _ in range(3)))
            assert max(waited) <= FALLS + WAKES

    play(script)


def test_one_that_comes_before_it_falls_asleep_does_not_wait_for_that():
    async def script(sleeper, engine):
        await asyncio.sleep(10.05)  # it is being asked whether its user has paused it
        assert await ask(sleeper, engine) == pytest.approx(0.05)
        assert engine.history == []

    play(script)


def test_one_that_leaves_while_it_waits_does_not_end_the_wait_of_others():
    async def script(sleeper, engine):
        await asyncio.sleep(20)
        first = asyncio.create_task(ask(sleeper, engine))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(ask(sleeper, engine))
        await asyncio.sleep(0.5)
        first.cancel()
        assert await second == WAKES - 0.5
        assert [what for _, what in engine.history] == ["sleep 1", "wake"]

    play(script)


def test_one_that_leaves_alone_leaves_an_engine_that_sleeps_again():
    async def script(sleeper, engine):
        await asyncio.sleep(20)
        alone = asyncio.create_task(ask(sleeper, engine))
        await asyncio.sleep(0.5)
        alone.cancel()
        await asyncio.sleep(20)
        assert [what for _, what in engine.history] == ["sleep 1", "wake", "sleep 1"]

    play(script)


def test_a_failed_wake_ends_those_that_waited_and_the_next_tries_again():
    async def script(sleeper, engine):
        await asyncio.sleep(20)
        engine.broken_until = 25
        exchange = Exchange()
        EXCHANGE.set(exchange)
        found = await asyncio.gather(
            *(ask(sleeper, engine) for _ in range(2)), return_exceptions=True
        )
        assert [type(error) for error in found] == [CannotWake] * 2
        assert found[0].http_status == 503 and "Try again later" in found[0].message
        assert exchange.failed
        await asyncio.sleep(5)
        assert await ask(sleeper, engine) == WAKES

    play(script)


def test_what_cannot_wake_falls_no_less_deep():
    async def script(sleeper, engine):
        await asyncio.sleep(50)
        engine.broken_until = 60
        with suppress(CannotWake):
            await ask(sleeper, engine)
        await asyncio.sleep(100)
        assert [what for _, what in engine.history] == ["sleep 1", "sleep 2", "wake"]

    play(script)


def test_a_dead_engine_is_said_to_be_dead():
    async def script(sleeper, engine):
        await asyncio.sleep(20)
        engine.broken_until, engine.error = 1000, EngineDeadError()
        with pytest.raises(EngineDeadError):
            await ask(sleeper, engine)

    play(script)


def test_an_engine_that_its_user_has_sleep_stays_asleep():
    async def script(sleeper, engine):
        await sleeper.sleep(engine.users_sleep, 1)
        await ask(sleeper, engine)  # vLLM lets it wait
        await asyncio.sleep(100)
        assert await sleeper.wake_up(engine.users_wake)
        assert engine.history[-1][1] == "user's wake"
        await asyncio.sleep(14)
        assert engine.history[-1][1] == "sleep 1"

    play(script)


@pytest.mark.parametrize(
    ("level", "before"), [(0, ["wake"]), (1, []), (2, ["sleep 2"])], ids=["pause", "1", "2"]
)
def test_a_user_takes_over_an_engine_that_sleeps(level, before):
    async def script(sleeper, engine):
        await asyncio.sleep(20)
        await sleeper.sleep(engine.users_sleep, level)
        assert [what for _, what in engine.history[1:]] == [*before, "user's sleep"]
        await asyncio.sleep(100)
        assert engine.history[-1][1] == "user's sleep"
        await sleeper.wake_up(engine.users_wake)
        assert await ask(sleeper, engine) == 0

    play(script)


def test_a_user_wakes_an_engine_that_sleeps_by_itself():
    async def script(sleeper, engine):
        await asyncio.sleep(50)
        assert await sleeper.wake_up(engine.users_wake)
        await asyncio.sleep(14)
        assert [what for _, what in engine.history[2:]] == ["user's wake", "sleep 1"]
        assert await ask(sleeper, engine) == WAKES

    play(script)


MOMENTS = st.floats(0, 80, allow_nan=False)
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), MOMENTS, st.floats(0, 15)),
    st.tuples(st.just("leave"), MOMENTS, st.floats(0, 6)),  # asks, and goes so much later
    st.tuples(st.just("user"), MOMENTS, st.sampled_from([1, 2])),
    st.tuples(st.just("user wakes"), MOMENTS, st.none()),
    st.tuples(st.just("breaks"), MOMENTS, st.floats(0, 20)),  # no waking up for so long
)


@given(st.lists(ACTIONS, max_size=12))
def test_whatever_happens_at_whatever_moment(actions):
    """The engine gets no wrong call, every request ends, and at last the engine sleeps."""

    async def act(sleeper, engine, what, at, value):
        await asyncio.sleep(at)
        if what == "ask":
            with suppress(CannotWake):
                await ask(sleeper, engine, value)
        elif what == "leave":
            with suppress(CannotWake, TimeoutError):
                await asyncio.wait_for(ask(sleeper, engine, 5), value)
        elif what == "user":
            await sleeper.sleep(engine.users_sleep, value)
        elif what == "user wakes":
            await sleeper.wake_up(engine.users_wake)
        else:
            engine.broken_until = at + value

    async def script(sleeper, engine):
        await asyncio.gather(*(act(sleeper, engine, *action) for action in actions))
        await asyncio.sleep(25)
        await sleeper.wake_up(engine.users_wake)
        assert await ask(sleeper, engine) == 0
        await asyncio.sleep(100)
        assert engine.level == 2

    play(script)
