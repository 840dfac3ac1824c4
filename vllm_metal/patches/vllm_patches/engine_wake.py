# SPDX-License-Identifier: Apache-2.0
"""Has an engine that is idle make a step where its connector has work that no request brings."""

# Remove when connectors may wake engines. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace


def let_connectors_wake() -> None:
    """Tells connectors how to wake the engine that they are of; call it in that engine's process.

    An engine without requests waits for the next message of its front end. vLLM asks the connector
    only when a message has come, by `has_pending_push_work`, whether a step is due.

    A connector that has `wake_by` gets a function: for any thread, it has the engine ask, and says
    whether it will. An engine that ends does not. One in its user's process makes steps when its
    user calls it, and no connector is told how to wake it.
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for kind in (EngineCoreProc, DPEngineCoreProc):
        replace(kind, "run_busy_loop", _telling_the_connector)


def _telling_the_connector(run_busy_loop: Callable[[Any], None], self: Any) -> None:
    wake_by = getattr(self.scheduler.connector, "wake_by", None)
    if wake_by is not None:
        wake_by(lambda: _wake(self))
    run_busy_loop(self)


def _wake(engine: Any) -> bool:
    from vllm.v1.engine import EngineCoreRequestType

    if not engine.is_running():
        return False
    engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
    return True
