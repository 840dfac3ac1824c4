# SPDX-License-Identifier: Apache-2.0
"""Has an engine that waits for a rank of another machine hear that its executor has ended."""

# Remove when readers on other machines hear of a shutdown, too. Read against vLLM 0.33.

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace

#: Seconds between two looks at whether a queue was shut down.
LOOK_S = 0.5


def hear_of_a_shutdown() -> None:
    """Has readers of a queue from another machine raise once the queue is shut down.

    Readers in shared memory do. An executor whose rank has ended shuts its queues down; an engine
    that waits for a rank whose machine is silent would never read that its executor has failed.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    replace(MessageQueue, "dequeue", _looking)


def _looking(
    dequeue: Callable[..., Any], self: Any, timeout: float | None = None, indefinite: bool = False
) -> Any:
    if not self._is_remote_reader:
        return dequeue(self, timeout, indefinite)
    ends = None if timeout is None else time.monotonic() + timeout
    while True:
        rest = LOOK_S if ends is None else min(LOOK_S, ends - time.monotonic())
        try:
            return dequeue(self, max(rest, 0.0), indefinite)
        except TimeoutError:
            if self.shutting_down:
                raise RuntimeError("cancelled") from None  # as readers in shared memory say
            if ends is not None and time.monotonic() >= ends:
                raise
