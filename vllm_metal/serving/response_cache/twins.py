# SPDX-License-Identifier: Apache-2.0
"""Requests of one key at one time: the first asks, the others wait for its answer."""

from __future__ import annotations

import asyncio

from vllm_metal.serving.response_cache.entry import Entry


class NotKept(Exception):
    """The first one's answer may not be given to others: an error, or one that was cut off."""


class Abandoned(Exception):
    """The first one went away before its answer was whole: one of the others asks instead."""


class Twins:
    """Who asks for which key now. Of one event loop."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[Entry]] = {}

    def join(self, key: str) -> asyncio.Future[Entry] | None:
        """The answer that somebody has asked for; it may end with NotKept or Abandoned.

        Returns:
            None: nobody has. The caller asks, and calls `end` whatever happens.
        """
        found = self._asked.get(key)
        if found is None:
            self._asked[key] = asyncio.get_running_loop().create_future()
        return found

    def end(self, key: str, outcome: Entry | Exception) -> None:
        """Gives the outcome to all who wait; nothing where it was given before."""
        waited_for = self._asked.pop(key, None)
        if waited_for is None or waited_for.done():
            return
        if isinstance(outcome, Entry):
            waited_for.set_result(outcome)
        else:
            waited_for.set_exception(outcome)
            waited_for.exception()  # nobody may be waiting, which is no mistake
