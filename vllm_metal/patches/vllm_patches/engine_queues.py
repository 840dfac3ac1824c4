# SPDX-License-Identifier: Apache-2.0
"""Makes an engine that waits for a remote rank notice when its executor has ended."""

# Remove when readers on other machines hear of a shutdown, too. Read against vLLM 0.33.

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm_metal.patches.vllm_patches.replacing import replace

#: Seconds between checks whether a queue was shut down.
POLL_INTERVAL_S = 0.5


def notice_queue_shutdown() -> None:
    """Makes readers of a remote message queue raise once the queue is shut down."""
    # Readers in shared memory do so already. An executor shuts its queues down if a rank ends, but
    # an engine that waits for a rank on a silent machine would never see that.
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    replace(MessageQueue, "dequeue", _dequeue_until_shut_down)


def _dequeue_until_shut_down(
    dequeue: Callable[..., Any], self: Any, timeout: float | None = None, indefinite: bool = False
) -> Any:
    if not self._is_remote_reader:
        return dequeue(self, timeout, indefinite)
    ends = None if timeout is None else time.monotonic() + timeout
    while True:
        rest = POLL_INTERVAL_S if ends is None else min(POLL_INTERVAL_S, ends - time.monotonic())
        try:
            return dequeue(self, max(rest, 0.0), indefinite)
        except TimeoutError:
            if self.shutting_down:
                raise RuntimeError("cancelled") from None  # as for readers in shared memory
            if ends is not None and time.monotonic() >= ends:
                raise
