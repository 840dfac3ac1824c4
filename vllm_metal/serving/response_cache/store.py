# SPDX-License-Identifier: Apache-2.0
"""Store: the interface to stores of cached responses."""

from __future__ import annotations

from typing import Protocol


class StoreError(Exception):
    """The store is unavailable. The message must not contain data of an entry."""


class Store(Protocol):
    """Stores bytes by key, with TTL and size limit. Methods but `close` may raise StoreError."""

    async def get(self, key: str, owner: str = "") -> bytes | None:
        """Returns an owner's value; None if there is none, or it has expired."""

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        """Stores a value, and evicts other values to make room.

        `key` is hex digits and differs between owners. `owner`, a name without colons, is what
        `purge` removes values by.
        """

    async def purge(self, owner: str | None = None) -> int:
        """Removes an owner's values, or all values if None; returns their number."""

    async def num_bytes(self) -> int:
        """Returns the bytes of all values."""

    async def close(self) -> None:
        """Ends connections and threads."""
