# SPDX-License-Identifier: Apache-2.0
"""Store: where answers are kept."""

from __future__ import annotations

from typing import Protocol


class StoreError(Exception):
    """The store cannot be asked now. The message has nothing of an entry in it."""


class Store(Protocol):
    """Bytes by key, for a time, within a size. Every method but `close` may raise StoreError."""

    async def get(self, key: str, owner: str = "") -> bytes | None:
        """What is kept for an owner under a key; None: nothing, or its time is over."""

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        """Keeps a value, in the place of an older one; the least recently used ones make room.

        Args:
            key: hex digits; different ones for different owners.
            value: bytes.
            owner: whose it is, without colons, for `purge`.
        """

    async def purge(self, owner: str | None = None) -> int:
        """Removes what an owner has, or all; returns how many values."""

    async def num_bytes(self) -> int:
        """Bytes of all that is kept."""

    async def close(self) -> None:
        """Ends connections and threads; the store is not used any more."""
