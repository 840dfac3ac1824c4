# SPDX-License-Identifier: Apache-2.0
"""Routes requests and sleep/wake calls through the idle-sleep manager of an engine."""

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

_MANAGER = "vllm_metal_keeper"  # an engine's attribute
#: Methods of `AsyncLLM` other than requests that need the engine or its workers awake.
_ENGINE_CALLS = (
    *("add_lora", "remove_lora", "list_loras", "pin_lora", "collective_rpc"),
    *("reset_mm_cache", "reset_prefix_cache", "reset_encoder_cache", "compute_weight_checksums"),
    *("pause_generation", "resume_generation", "release_kv_cache_memory"),
    *("start_profile", "stop_profile"),
)


class SleepManager(Protocol):
    """Puts an engine to sleep when it is idle, and wakes it up."""

    def begin(self) -> None:
        """Starts watching on the running event loop. Later calls do nothing."""

    def request(self) -> AbstractAsyncContextManager[None]:
        """Returns a context for one request; entering it waits until the engine is awake."""

    async def sleep(self, call: Callable[[], Awaitable[None]], level: int) -> None:
        """Awaits `call`, with which a user puts the engine to sleep at this level."""

    async def wake_up(self, call: Callable[[], Awaitable[bool]]) -> bool:
        """Awaits `call`, with which a user wakes the engine; returns whether all of it is awake."""

    def close(self) -> None:
        """Stops watching: the engine ends."""


class Engine:
    """A vLLM engine with the operations that its sleep manager needs."""

    def __init__(self, engine: Any) -> None:
        """Holds vLLM's `AsyncLLM` by a weak reference, so that it can be freed."""
        self._engine = weakref.proxy(engine)

    async def is_stopped(self) -> bool:
        """Returns whether the engine is paused or asleep."""
        return bool(await self._engine.is_sleeping())

    async def sleep(self, level: int) -> None:
        """Gives memory back once the engine has no work left.

        `level` is vLLM's: 1, or 2 after 1.
        """
        if level == 1:
            await self._engine.renderer.clear_mm_cache_async()
            await self._engine.engine_core.sleep_async(1, "wait")
        else:
            # vLLM's executor ignores `sleep` while asleep, so level 2 goes to the worker directly;
            # not by `AsyncLLM.collective_rpc`, which would wake the engine up.
            await self._engine.engine_core.collective_rpc_async("sleep", None, (), {"level": level})
        self._record(1, level)

    async def wake_up(self) -> None:
        """Allocates all memory again and resumes requests; if it raises, the engine sleeps on."""
        await self._engine.engine_core.wake_up_async(None)
        self._record(0, 0)

    def _record(self, asleep: int, level: int) -> None:
        if (loggers := self._engine.logger_manager) is not None:
            loggers.record_sleep_state(asleep, level)


def manage(
    make: Callable[[VllmConfig, Engine], SleepManager | None],
    refuse: Callable[[VllmConfig], None],
) -> None:
    """Gives every engine of a server, or of `AsyncLLM`, its sleep manager.

    Args:
        make: makes the manager for an engine with this configuration, or returns None.
        refuse: raises if the configuration asks for idle sleep in an `LLM`, which has no event
            loop to watch it.
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
        if (manager := make(vllm_config, Engine(self))) is not None:
            setattr(self, _MANAGER, manager)
            with suppress(RuntimeError):  # no event loop yet: the first request starts it
                asyncio.get_running_loop()
                manager.begin()

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
    """Makes `LLM` raise if requests would wait for an engine that its user put to sleep."""
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


def is_managed(engine: Any) -> bool:
    """Returns whether an engine has a sleep manager."""
    return hasattr(engine, _MANAGER)


def _generate(
    generate: Callable[..., AsyncGenerator[Any, None]], engine: Any, *args: Any, **options: Any
) -> AsyncGenerator[Any, None]:
    outputs = generate(engine, *args, **options)
    manager: SleepManager | None = getattr(engine, _MANAGER, None)
    return outputs if manager is None else _while_awake(outputs, manager)


async def _while_awake(
    outputs: AsyncGenerator[Any, None], manager: SleepManager
) -> AsyncGenerator[Any, None]:
    manager.begin()
    async with manager.request(), aclosing(outputs):
        async for output in outputs:
            yield output


async def _call(
    call: Callable[..., Awaitable[Any]], engine: Any, *args: Any, **options: Any
) -> Any:
    # Calls by a route or a user run while the engine is awake.
    manager: SleepManager | None = getattr(engine, _MANAGER, None)
    if manager is None:
        return await call(engine, *args, **options)
    manager.begin()
    async with manager.request():
        return await call(engine, *args, **options)


async def _sleep(
    sleep: Callable[..., Awaitable[None]], engine: Any, level: int = 1, *args: Any, **options: Any
) -> None:
    manager: SleepManager | None = getattr(engine, _MANAGER, None)
    if manager is None:
        await sleep(engine, level, *args, **options)
    else:
        await manager.sleep(lambda: sleep(engine, level, *args, **options), level)


async def _wake_up(
    wake_up: Callable[..., Awaitable[bool]], engine: Any, *args: Any, **options: Any
) -> bool:
    manager: SleepManager | None = getattr(engine, _MANAGER, None)
    if manager is None:
        return await wake_up(engine, *args, **options)
    return await manager.wake_up(lambda: wake_up(engine, *args, **options))


def _shutdown(
    shutdown: Callable[..., None],
    engine: Any,
    *args: Any,
    _is_exiting: Callable[[], bool] = sys.is_finalizing,
    **options: Any,
) -> None:
    # `AsyncLLM.__del__` calls this at interpreter exit, when the globals of this module and of
    # vLLM's are gone: hence the default argument. vLLM's finalizers have done the work by then.
    if _is_exiting():
        return
    if (manager := getattr(engine, _MANAGER, None)) is not None:
        manager.close()
    shutdown(engine, *args, **options)
