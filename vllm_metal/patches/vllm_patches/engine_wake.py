# SPDX-License-Identifier: Apache-2.0
"""Lets a connector wake an idle engine for work that no request brings."""

# Remove when connectors may wake engines. Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace


def let_connectors_wake() -> None:
    """Gives connectors a function that wakes their engine; call it in the engine's process.

    A connector with `wake_by` gets a function that any thread may call. It makes the engine ask
    `has_pending_push_work`, and returns False if the engine is ending. Connectors of an engine in
    its user's process get none: such an engine only steps when its user calls it.
    """
    # An engine without requests blocks on its front end's next message. vLLM asks the connector
    # whether a step is due only after such a message.
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc

    for kind in (EngineCoreProc, DPEngineCoreProc):
        replace(kind, "run_busy_loop", _offer_wake_up)


def _offer_wake_up(run_busy_loop: Callable[[Any], None], self: Any) -> None:
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
