# SPDX-License-Identifier: Apache-2.0
"""An event loop whose clock jumps to the next timer: what takes minutes is run at once."""

import asyncio


class VirtualTime(asyncio.SelectorEventLoop):
    """Timers fire in their order, as soon as nothing else is to be done."""

    def __init__(self):
        super().__init__()
        self._passed = 0.0
        select = self._selector.select

        def jump(timeout=None):
            assert timeout is not None, "everybody waits, and no timer is set"
            self._passed += max(timeout, 0)
            return select(0)

        self._selector.select = jump

    def time(self):
        """Seconds since the loop was made."""
        return self._passed


def run(main):
    """What a coroutine returns."""
    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        return runner.run(main)
