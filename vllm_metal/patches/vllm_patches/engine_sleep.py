# SPDX-License-Identifier: Apache-2.0
"""Has who puts an idle engine to sleep stand before its requests, and before its user's calls."""

# Remove when vLLM puts idle engines to sleep, and wakes them up. Read against vLLM 0.33.

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KEEPER = "vllm_metal_keeper"  # an engine's attribute
#: Methods of `AsyncLLM`, beside requests, whose work is the engine's or its workers'.
_ENGINE_CALLS = (
    *("add_lora", "remove_lora", "list_loras", "pin_lora", "collective_rpc"),
    *("reset_mm_cache", "reset_prefix_cache", "reset_encoder_cache", "compute_weight_checksums"),
    *("pause_generation", "resume_generation", "release_kv_cache_memory"),
    *("start_profile", "stop_profile"),
)


class SleepManager(Protocol):
    """Whoever puts an engine to sleep when it is idle, and wakes it up."""

    def begin(self) -> None:
        """Begins to look; on the running event loop. Does nothing the second time."""

    def request(self) -> AbstractAsyncContextManager[None]:
        """What surrounds a request in the engine: its start waits until the engine is awake."""

    async def sleep(self, call: Callable[[], Awaitable[None]], level: int) -> None:
        """Makes a user's call that puts the engine to sleep at this level."""

    async def wake_up(self, call: Callable[[], Awaitable[bool]]) -> bool:
        """Makes a user's call that wakes the engine up; returns whether all of it is awake."""

    def close(self) -> None:
        """Looks no more: the engine ends."""


class Engine:
    """One of vLLM's engines, as a keeper has it sleep."""

    def __init__(self, engine: Any) -> None:
        """Takes vLLM's `AsyncLLM`, and does not keep it from ending."""
        self._engine = weakref.proxy(engine)

    async def is_stopped(self) -> bool:
        """Whether somebody has paused it, or put it to sleep."""
        return bool(await self._engine.is_sleeping())

    async def sleep(self, level: int) -> None:
        """Gives memory back, once the engine is done with all that it has.

        Args:
            level: vLLM's: 1, or 2 from 1 on. vLLM's executor takes a sleeping engine deeper by no
                call, so its worker is told.
        """
        if level == 1:
            await self._engine.renderer.clear_mm_cache_async()
            await self._engine.engine_core.sleep_async(1, "wait")
        else:
            # Not by `AsyncLLM.collective_rpc`, which would wake the engine up.
            await self._engine.engine_core.collective_rpc_async("sleep", None, (), {"level": level})
        self._record(1, level)

    async def wake_up(self) -> None:
        """Takes all of its memory again, and goes on with requests.

        Raises:
            Exception: it cannot; it sleeps on.
        """
        await self._engine.engine_core.wake_up_async(None)
        self._record(0, 0)

    def _record(self, asleep: int, level: int) -> None:
        if (loggers := self._engine.logger_manager) is not None:
            loggers.record_sleep_state(asleep, level)


def keep(
    make: Callable[[VllmConfig, Engine], SleepManager | None],
    refuse: Callable[[VllmConfig], None],
) -> None:
    """Gives every engine of a server, or of `AsyncLLM`, its keeper.

    Args:
        make: makes the keeper of an engine with this configuration; None: it gets none.
        refuse: raises where the configuration asks for one and the engine is an `LLM`'s, which
            nobody's event loop looks after.
    """
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    def refusing(
        init: Callable[..., None], self: Any, vllm_config: VllmConfig, *args: Any, **options: Any
    ) -> None:
        refuse(vllm_config)
        init(self, vllm_config, *args, **options)

    def keeping(
        init: Callable[..., None], self: Any, vllm_config: VllmConfig, *args: Any, **options: Any
    ) -> None:
        init(self, vllm_config, *args, **options)
        if (keeper := make(vllm_config, Engine(self))) is not None:
            setattr(self, _KEEPER, keeper)
            with suppress(RuntimeError):  # there is no event loop yet: with the first request
                asyncio.get_running_loop()
                keeper.begin()

    replace(LLMEngine, "__init__", refusing)
    replace(AsyncLLM, "__init__", keeping)
    for answers in ("generate", "encode"):
        replace(AsyncLLM, answers, _generate)
    for calls in _ENGINE_CALLS:
        replace(AsyncLLM, calls, _call)
    replace(AsyncLLM, "sleep", _sleep)
    replace(AsyncLLM, "wake_up", _wake_up)
    replace(AsyncLLM, "shutdown", _shutdown)


def refuse_to_wait_asleep() -> None:
    """Has `LLM` raise where its requests would wait for an engine that its user had sleep."""
    from vllm.entrypoints.common.offline import OfflineInferenceMixin

    replace(OfflineInferenceMixin, "_run_engine", _run_awake)


def _run_awake(run: Callable[..., Any], llm: Any, *args: Any, **options: Any) -> Any:
    engine = llm.llm_engine
    if engine.has_unfinished_requests() and engine.is_sleeping():
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        raise RuntimeError(
            "Requests are not supported while the engine sleeps: nothing would compute them. Call "
            "wake_up() first."
        )
    return run(llm, *args, **options)


def is_kept(engine: Any) -> bool:
    """Whether an engine has a keeper."""
    return hasattr(engine, _KEEPER)


def _generate(
    generate: Callable[..., AsyncGenerator[Any, None]], engine: Any, *args: Any, **options: Any
) -> AsyncGenerator[Any, None]:
    outputs = generate(engine, *args, **options)
    keeper: SleepManager | None = getattr(engine, _KEEPER, None)
    return outputs if keeper is None else _kept(outputs, keeper)


async def _kept(
    outputs: AsyncGenerator[Any, None], keeper: SleepManager
) -> AsyncGenerator[Any, None]:
    keeper.begin()
    async with keeper.request(), aclosing(outputs):
        async for output in outputs:
            yield output


async def _call(
    call: Callable[..., Awaitable[Any]], engine: Any, *args: Any, **options: Any
) -> Any:
    """A call by a route or a user, which finds the engine awake."""
    keeper: SleepManager | None = getattr(engine, _KEEPER, None)
    if keeper is None:
        return await call(engine, *args, **options)
    keeper.begin()
    async with keeper.request():
        return await call(engine, *args, **options)


async def _sleep(
    sleep: Callable[..., Awaitable[None]], engine: Any, level: int = 1, *args: Any, **options: Any
) -> None:
    keeper: SleepManager | None = getattr(engine, _KEEPER, None)
    if keeper is None:
        await sleep(engine, level, *args, **options)
    else:
        await keeper.sleep(lambda: sleep(engine, level, *args, **options), level)


async def _wake_up(
    wake_up: Callable[..., Awaitable[bool]], engine: Any, *args: Any, **options: Any
) -> bool:
    keeper: SleepManager | None = getattr(engine, _KEEPER, None)
    if keeper is None:
        return await wake_up(engine, *args, **options)
    return await keeper.wake_up(lambda: wake_up(engine, *args, **options))


def _shutdown(
    shutdown: Callable[..., None],
    engine: Any,
    *args: Any,
    _is_exiting: Callable[[], bool] = sys.is_finalizing,
    **options: Any,
) -> None:
    # `AsyncLLM.__del__` calls this when the interpreter exits and the names of modules are gone,
    # this one's and vLLM's. What was to be done then, vLLM's finalizers have done before.
    if _is_exiting():
        return
    if (keeper := getattr(engine, _KEEPER, None)) is not None:
        keeper.close()
    shutdown(engine, *args, **options)
