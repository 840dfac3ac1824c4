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
    """Knows who asks for which key now; it belongs to one event loop."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[Entry]] = {}

    def join(self, key: str) -> asyncio.Future[Entry] | None:
        """The answer that somebody has asked for; it may end with NotKept or Abandoned.

        Returns:
            None: nobody has. The caller calls `lead`, and asks.
        """
        return self._asked.get(key)

    def lead(self, key: str) -> Lead:
        """Has others wait for what the caller asks for, until it says `end`, whatever happens."""
        self._asked[key] = asyncio.get_running_loop().create_future()
        return Lead(self._asked, key)


class Lead:
    """The first request of a key."""

    def __init__(self, asked: dict[str, asyncio.Future[Entry]], key: str) -> None:
        self._asked, self._key, self._future = asked, key, asked[key]

    def end(self, outcome: Entry | Exception) -> None:
        """Gives the outcome to all who wait; nothing the second time."""
        if self._future.done():
            return
        del self._asked[self._key]
        if isinstance(outcome, Entry):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
            self._future.exception()  # nobody may be waiting, which is no mistake
