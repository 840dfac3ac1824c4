# SPDX-License-Identifier: Apache-2.0
"""What a store of pages is: classes for its two sides, and for its settings.

The worker has a `Store`, which keeps pages; vLLM's scheduler, perhaps in another process, a `View`,
which knows what is there. Each is made from the settings. What one side has to tell the other
travels with a step, pickled if need be: see `messages.py`.
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
    """Where pages belong; those of another namespace, or of other weights, are kept apart."""

    name: str | None  # see `salts.namespace`; None: the text is not to be kept on any disk
    content: PoolContent  # of the weights that were loaded when this was made


class OfferedPages:
    """Pages of a store that others may have through a store that serves them.

    They are of the content that was in use when this was taken. Methods are for any thread, and
    never raise.
    """

    def find(self, keys: Iterable[bytes]) -> set[bytes]:
        """Returns those that are there, as far as is known; at once."""
        raise NotImplementedError

    def read(self, key: bytes) -> memoryview | None:
        """Returns a page, read-only bytes; None: it is not there. Blocking."""
        raise NotImplementedError


class Store:
    """The worker's side of a store.

    Methods that take a namespace are for any thread and never raise. All of them may block but
    `wants`, which the engine's thread calls, as it does all others: those return soon.
    """

    #: What the scheduler's side must know beside the settings; can be pickled.
    handshake: Any = None
    #: Pages of the pool that others may have from it; None: nobody may.
    shared_pool: SharedPool | None = None

    def use(self, content: PoolContent) -> None:
        """From now on pages are of this content: there is a pool, or other weights were loaded."""

    def wants(self, namespace: Namespace, key: bytes) -> bool:
        """Whether a page is missing, and would be kept now."""
        return False

    def write(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float, depth: int
    ) -> bool:
        """Keeps a page; whether it was kept.

        Args:
            namespace: of the page.
            key: 1 to 64 bytes, a hash.
            row: [bytes of the page] uint8; it does not change meanwhile.
            used_at: when its text came, seconds since the epoch.
            depth: number of blocks before it in its text. Those behind are of no use without it.
        """
        return False

    def write_shared(
        self, namespace: Namespace, key: bytes, row: np.ndarray, used_at: float
    ) -> bool:
        """Keeps a page that `shared_pool` says is wanted; see `write`."""
        return False

    def read(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        rows: Sequence[np.ndarray],
        hint: Any,
        wanted: Callable[[], bool],
    ) -> set[int]:
        """Fills rows; returns the indices of those that it could fill.

        Args:
            namespace: of the pages.
            keys: of pages.
            rows: [bytes of the page] uint8 each; undefined where not filled.
            hint: what `Lookup.hint` gave for the load; None: nothing.
            wanted: asked now and then; reading ends where it is false.
        """
        return set()

    def touch(self, namespace: Namespace, keys: Sequence[bytes], used_at: float) -> None:
        """Marks the pages of a text, from its first block on, as used."""

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Serves pages to nobody from now on; `discard` follows."""

    def discard(self, namespace: Namespace, keys: Iterable[bytes]) -> None:
        """Removes pages."""

    @property
    def serves_others(self) -> bool:
        """Whether others may have pages through this store."""
        return False

    def offered(self) -> OfferedPages | None:
        """What others may have of this store's pages; None: nothing."""
        return None

    def serve(self, pages: Sequence[OfferedPages]) -> None:
        """Others may have these as well, until `use` is called."""

    def expect(self, keys: Iterable[bytes]) -> None:
        """Pages are about to be written; each call is paid by one `expect_no_more`."""

    def expect_no_more(self, keys: Iterable[bytes]) -> None:
        """Pages that were expected are there, or will not come."""

    def news(self) -> Any | None:
        """What the view has to hear, since the last call; can be pickled. None: nothing."""
        return None

    def figures(self) -> Any | None:
        """Figures, of the class that the settings name; None: as they were."""
        return None

    def close(self) -> None:
        """Ends the threads. Called after the last read and write."""


class Lookup:
    """What a store has of one request's pages: an answer, which may still be coming."""

    @property
    def done(self) -> bool:
        """Whether the answer is there, or it is time to go on without."""
        return True

    def contains(self, key: bytes) -> bool:
        """Whether a page is there, as far as is known."""
        return False

    def hint(self, keys: Sequence[bytes]) -> Any | None:
        """What goes to the worker with a load of these pages; can be pickled."""
        return None

    def loaded(self) -> None:
        """The pages that `hint` was asked about have come; `release` follows."""

    def release(self, failed: bool) -> Lookup | None:
        """The pages are not needed any more; may be called again.

        Args:
            failed: their load did.

        Returns:
            What counts as the store's answer from now on; None: if the request starts again, the
            store is asked again.
        """
        return self


class View:
    """The scheduler's side of a store; all methods are the scheduler thread's, and return soon."""

    source: ClassVar[CacheHitSource]  # what vLLM counts hits of this store as

    def use(self, content: PoolContent) -> None:
        """The worker's pages are others now."""

    def look_up(
        self,
        namespace: str | None,
        keys: Callable[[], Sequence[bytes]],
        params: Mapping[str, Any] | None,
    ) -> Lookup:
        """Asks what is there for a request.

        Args:
            namespace: see `Namespace.name`.
            keys: gives those of the pages that the request could begin with.
            params: the request's `kv_transfer_params`.
        """
        raise NotImplementedError

    def wants(self, namespace: str | None, key: bytes) -> bool:
        """Whether a page is worth offering to the worker, which knows best."""
        return True

    def hear(self, news: Any) -> None:
        """Takes what `Store.news` gave."""

    def computed(self, prefill_rows: int, prefill_seconds: float) -> None:
        """The device has prefilled so many tokens since the last call, in so many seconds."""

    def figures(self) -> Any | None:
        """Figures, of the class that the settings name; None: it has none."""
        return None

    def params_for_others(self, req_id: str) -> dict[str, Any] | None:
        """What a proxy hands to an engine that goes on with a request; None: nothing."""
        return None

    def close(self) -> None:
        """Ends the threads."""


def view_of(name: str) -> str:
    """Whose figures those of a store's view are."""
    return f"{name} view"


class StoreConfig:
    """The settings of a store that the user asked for; `registry.py` lists the subclasses.

    They are read wherever vLLM's configuration is, also where nothing is served. So what the two
    sides need is imported by the methods that make them.
    """

    name: ClassVar[str]
    asked_by: ClassVar[str]  # the settings that ask for it, for messages
    asking: ClassVar[Sequence[str]]  # the same, as keys: any one will do
    readers: ClassVar[Mapping[str, values.Reader]]  # of its keys in kv_connector_extra_config
    #: Its keys of --additional-config, and the keys that they stand for.
    short: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def is_asked_for(cls, given: Mapping[str, Any]) -> bool:
        """Whether values that were read ask for it."""
        return any(given.get(key) for key in cls.asking)

    @classmethod
    def check(cls, given: Mapping[str, Any], role: str, where: str, instead: str | None) -> None:
        """Checks values that were read against each other and the machine.

        Args:
            given: by key.
            role: kv_role.
            where: the option's name, for messages.
            instead: what else the user could ask for; None: he has.

        Raises:
            ValueError: they cannot be honored; the message names the setting.
        """

    @classmethod
    def of(cls, given: Mapping[str, Any], role: str) -> StoreConfig:
        """Returns the settings in values that were read, defaults filled in.

        Args:
            given: by key.
            role: kv_role.
        """
        return cls()

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as JSON values, which `of` reads again."""
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        """Memory of the worker's that it takes at most, beside the pool."""
        return 0

    @property
    def is_waited_for(self) -> bool:
        """Whether others wait for pages, which leave the pool as soon as can be then."""
        return False

    @property
    def shares_pool(self) -> bool:
        """Whether others may have pages from the pool, so that its store has a `shared_pool`."""
        return False

    @property
    def figures(self) -> type:
        """What `Store.figures` gives: a dataclass of `metrics.metric` fields."""
        raise NotImplementedError

    @property
    def view_figures(self) -> type | None:
        """What `View.figures` gives, as `figures`; None: nothing."""
        return None

    def open(self, engine_id: str) -> Store:
        """Makes the worker's side.

        Raises:
            ValueError, OSError: the settings cannot be honored.
        """
        raise NotImplementedError

    def view(self, engine_id: str, content: PoolContent, handshake: Any) -> View:
        """Makes the scheduler's side.

        Args:
            engine_id: of this run of the engine.
            content: what pages the worker has.
            handshake: the store's.
        """
        raise NotImplementedError
