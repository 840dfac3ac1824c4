# SPDX-License-Identifier: Apache-2.0
"""Interface of a page store: `Store`, `View` and `StoreConfig`.

The worker has a `Store`, which keeps pages; vLLM's scheduler, perhaps in another process, has a
`View` of its contents. Both are made from the settings, and their messages travel with steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from vllm_metal.identity.fingerprint import PoolContent
    from vllm_metal.kv_transfer.shared_pool import SharedPool
    from vllm_metal.settings import values


@dataclass(frozen=True)
class Namespace:
    """Separates pages of different tenants, and of different weights."""

    name: str | None  # see `salts.namespace`; None: the text must not be stored on disk
    content: PoolContent  # content of the weights loaded when this was made


class OfferedPages:
    """A store's pages that peers may get through another store; thread-safe, never raises."""

    # They have the content that was in use when this was made.

    def find(self, keys: Iterable[bytes]) -> set[bytes]:
        """Returns the available pages among `keys`, as far as known without blocking."""
        raise NotImplementedError

    def read(self, key: bytes) -> memoryview | None:
        """Returns a page's read-only bytes, None if it is gone; blocks."""
        raise NotImplementedError


class Store:
    """The worker's side of a store.

    Methods that take a namespace are thread-safe, never raise and may block, except `wants`. The
    engine's thread calls `wants` and all others, which must return quickly.
    """

    #: Picklable data that the view needs besides the settings.
    handshake: Any = None
    #: Pages of the pool that peers may get from it; None: not shared.
    shared_pool: SharedPool | None = None

    def use(self, content: PoolContent) -> None:
        """Sets fingerprint and sizes of all later pages, for a new pool or other weights."""

    def wants(self, namespace: Namespace, key: bytes) -> bool:
        """Returns whether a page is missing and would be stored now."""
        return False

    def write(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float, depth: int
    ) -> bool:
        """Stores a page; returns whether it was stored.

        Args:
            key: a hash of 1 to 64 bytes.
            row: [bytes of the page] uint8, unchanged during the call.
            used_at: arrival of its text, seconds since the epoch.
            depth: number of blocks before it in its text; later blocks are useless without it.
        """
        return False

    def write_shared(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float
    ) -> bool:
        """Stores a page that `shared_pool` wants; see `write`."""
        return False

    def read(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
        hint: Any,
        wanted: Callable[[], bool],
    ) -> set[int]:
        """Fills rows with pages; returns the indices of the filled rows.

        Args:
            rows: [bytes of the page] uint8 each; undefined if not filled.
            hint: result of `Lookup.hint` for this load.
            wanted: called at intervals; reading ends when it returns False.
        """
        return set()

    def touch(self, namespace: Namespace, keys: Sequence[bytes], used_at: float) -> None:
        """Marks the leading pages of a text as used."""

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Stops serving pages; `discard` follows."""

    def discard(self, namespace: Namespace, keys: Iterable[bytes]) -> None:
        """Removes pages."""

    @property
    def serves_others(self) -> bool:
        """Whether peers may get pages through this store."""
        return False

    def offered(self) -> OfferedPages | None:
        """Returns pages that another store may serve to peers."""
        return None

    def serve(self, pages: Sequence[OfferedPages]) -> None:
        """Also serves these pages to peers, until `use` is called."""

    def expect(self, keys: Iterable[bytes]) -> None:
        """Announces that pages will be written; balance each call with `expect_no_more`."""

    def expect_no_more(self, keys: Iterable[bytes]) -> None:
        """Notes that expected pages were written, or will not be."""

    def take_message(self) -> Any | None:
        """Returns a picklable message for the view since the last call; None if there is none."""
        return None

    def metrics(self) -> Any | None:
        """Returns metrics of the type `StoreConfig.metrics_type`; None: unchanged."""
        return None

    def close(self) -> None:
        """Ends the threads, after the last read and write."""


class Lookup:
    """A store's answer, perhaps pending, on which pages of a request it has."""

    @property
    def done(self) -> bool:
        """Whether the answer has come, or the wait for it is over."""
        return True

    def contains(self, key: bytes) -> bool:
        """Returns whether a page is known to be stored."""
        return False

    def hint(self, keys: Sequence[bytes]) -> Any | None:
        """Returns picklable data for the worker to load these pages with."""
        return None

    def loaded(self) -> None:
        """Notes that the pages passed to `hint` were loaded; `release` follows."""

    def release(self, failed: bool) -> Lookup | None:
        """Releases the found pages; may be called again. `failed`: loading them failed.

        Returns the lookup for the request's later calls; None: look up anew if it restarts.
        """
        return self


class View:
    """The scheduler's side of a store, called in the scheduler's thread; returns quickly."""

    source: ClassVar[CacheHitSource]  # vLLM's category for hits in this store

    def use(self, content: PoolContent) -> None:
        """Sets the fingerprint and page sizes of the worker's pages."""

    def look_up(
        self,
        namespace: str | None,
        keys: Callable[[], Sequence[bytes]],
        params: Mapping[str, Any] | None,
    ) -> Lookup:
        """Starts a lookup of a request's pages.

        `keys` returns the pages that it could load; `params` are its `kv_transfer_params`.
        """
        raise NotImplementedError

    def wants(self, namespace: str | None, key: bytes) -> bool:
        """Returns whether to offer a page to the worker, which decides."""
        return True

    def update(self, message: Any) -> None:
        """Processes a message of `Store.take_message`."""

    def computed(self, prefill_rows: int, prefill_seconds: float) -> None:
        """Notes how many tokens the device has prefilled since the last call, and the seconds."""

    def metrics(self) -> Any | None:
        """Returns an instance of `StoreConfig.view_metrics_type`; None without metrics."""
        return None

    def kv_transfer_params(self, req_id: str) -> dict[str, Any] | None:
        """Returns kv_transfer_params for the engine that continues a request; None without any."""
        return None

    def close(self) -> None:
        """Ends the threads."""


def view_of(name: str) -> str:
    """Returns the name under which the metrics of a store's view are reported."""
    return f"{name} view"


class StoreConfig:
    """Settings of a store; `registry.py` lists the subclasses."""

    # Any process that reads vLLM's configuration reads these, also one that serves nothing. So what
    # the two sides need is only imported in the methods that create them.

    name: ClassVar[str]
    enabled_by: ClassVar[str]  # the settings that enable it, for messages
    enabling_keys: ClassVar[Sequence[str]]  # the same as keys; any of them enables it
    readers: ClassVar[Mapping[str, values.Reader]]  # by key of kv_connector_extra_config
    #: Maps its keys of --additional-config to those of kv_connector_extra_config.
    short: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def is_enabled(cls, given: Mapping[str, Any]) -> bool:
        """Returns whether the given values enable the store."""
        return any(given.get(key) for key in cls.enabling_keys)

    @classmethod
    def check(cls, given: Mapping[str, Any], role: str, where: str, instead: str | None) -> None:
        """Checks given values against each other and the machine.

        Args:
            where: the option's name, for messages.
            instead: settings of other stores to suggest; None: one is already enabled.

        Raises:
            ValueError: a value is not supported; the message names the setting.
        """

    @classmethod
    def of(cls, given: Mapping[str, Any], role: str) -> StoreConfig:
        """Returns the settings in given values, completed with defaults; `role`: kv_role."""
        return cls()

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as JSON values for `of`."""
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Limit of the memory that the store takes in the worker, in addition to the pool."""
        return 0

    @property
    def is_waited_for(self) -> bool:
        """Whether other engines wait for pages, which are then copied out as soon as possible."""
        return False

    @property
    def shares_pool(self) -> bool:
        """Whether peers may get pages of the pool, so that the store has a `shared_pool`."""
        return False

    @property
    def metrics_type(self) -> type:
        """Type of `Store.metrics`: a dataclass of `metrics.metric` fields."""
        raise NotImplementedError

    @property
    def view_metrics_type(self) -> type | None:
        """Type of `View.metrics`; None if the view has no metrics."""
        return None

    def open(self, engine_id: str) -> Store:
        """Makes the worker's side; raises ValueError or OSError if a setting cannot be honored."""
        raise NotImplementedError

    def view(self, engine_id: str, content: PoolContent, handshake: Any) -> View:
        """Makes the scheduler's side, for the worker's content and the store's handshake."""
        raise NotImplementedError
