# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of the pages outside the pool: what is there, and what is worth keeping."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.kv_transfer.messages import Discard, PageKeys, RequestPlace
from vllm_metal.kv_transfer.metrics import transfer_stats
from vllm_metal.kv_transfer.peers import NOTHING, Asked
from vllm_metal.settings import salts

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.page_store import PageStore
    from vllm_metal.kv_transfer.peer.address import Address

#: A request whose loads failed so often computes. Each failure took a bad file off the disk, or the
#: machine cannot open files now.
MAX_FAILED_LOADS = 3
_NOT_KEPT = RequestPlace(None, 0.0)


class PageManager(OffloadingManager):
    """Answers vLLM's offloading scheduler from a page store.

    A page that is on its way there is a miss: its request computes it again rather than wait.
    """

    def __init__(self, salt_key: bytes | None, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            salt_key: see `salts.namespace`.
            clock: seconds since the epoch.
        """
        self._salt_key = salt_key
        self._clock = clock
        self._store: PageStore | None = None  # until the worker has said where it is
        self._salts: dict[str, str | None] = {}  # by request id, of requests about to be announced
        self._writing: set[OffloadKey] = set()
        self._ending: list[Sequence[OffloadKey]] = []  # pages that peers wait for
        self._discards: list[Discard] = []  # of which pages may still be there

    def open(self, store: PageStore) -> None:
        """The worker's store; nothing is found before."""
        self._store = store

    @property
    def address(self) -> tuple[str, Address] | None:
        """This engine's id, and where peers ask it for pages; None: nobody may."""
        peering = None if self._store is None else self._store.peering
        if peering is None or peering.address is None:
            return None
        return peering.engine_id, peering.address

    def note_salt(self, req_id: str, salt: str | None) -> None:
        """Called before `on_new_request`, which is not told of a request's cache_salt."""
        self._salts[req_id] = salt

    def namespace_of(self, salt: str | None) -> str | None:
        """See `salts.namespace`."""
        return salts.namespace(self._salt_key, salt)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.req_id in self._salts:
            namespace = self.namespace_of(self._salts.pop(req_context.req_id))
            req_context.set_state(RequestPlace(namespace, self._clock()))
        return RequestOffloadingContext()

    def hear_peers(self, keys: Callable[[], Sequence[OffloadKey]], req_context: ReqContext) -> bool:
        """Whether peers have said what they have of a request; asks them first.

        Args:
            keys: gives those of the pages that it could use.
            req_context: the request's.
        """
        peering = None if self._store is None else self._store.peering
        if peering is None or peering.peers is None:
            return True
        place = _place(req_context)
        if place.asked is None:
            asked = peering.peers.ask(keys(), _engine_id(req_context.kv_transfer_params))
            req_context.set_state(replace(place, asked=asked))
            return asked.done
        return place.asked.done

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        place = _place(req_context)
        if self._store is None or key in self._writing:
            return LookupResult.MISS
        if place.failed_loads >= MAX_FAILED_LOADS or self._is_distrusted(place.namespace, key):
            return LookupResult.MISS
        folder = self._store.shelf(place.namespace).folder
        found = (folder is not None and folder.contains(key)) or _at_peer(key, place)
        return LookupResult.HIT if found else LookupResult.MISS

    def load_failed(self, req_context: ReqContext) -> None:
        """A request's load failed. After some it computes all, or it might never begin.

        Peers are not asked again: what they failed to hand over would be waited for once more.
        """
        self._release(req_context, NOTHING)
        place = _place(req_context)
        req_context.set_state(replace(place, failed_loads=place.failed_loads + 1))

    def loads_nothing(self, req_context: ReqContext) -> None:
        """A request begins without pages from outside."""
        self._release(req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._release(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._release(req_context)

    def _release(self, req_context: ReqContext, then: Asked | None = None) -> None:
        """Peers need not keep the pages that a request asked for; once.

        Args:
            then: what counts as their answer from now on; None: they are asked again if the
                request starts again.
        """
        place = _place(req_context)
        if place.asked is None or place.asked is NOTHING:
            return
        assert self._store is not None and self._store.peering is not None
        assert self._store.peering.peers is not None
        self._store.peering.peers.release(place.asked)
        req_context.set_state(replace(place, asked=then))

    def distrust(self, discard: Discard) -> None:
        """Pages are not to be found any more, from now on and before they are gone."""
        self._discards.append(discard)
        if self._store is not None and self._store.outbox is not None:
            self._store.outbox.discard(discard.keys)

    def _is_distrusted(self, namespace: str | None, key: OffloadKey) -> bool:
        if not self._discards:
            return False
        self._discards = [discard for discard in self._discards if not discard.done.is_set()]
        return any(namespace == each.namespace and key in each.keys for each in self._discards)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        place = _place(req_context)
        folder = None if self._store is None else self._store.shelf(place.namespace).folder
        on_disk = folder is not None and folder.contains(key)
        return CacheHitSource.P2P if not on_disk and _at_peer(key, place) else CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PageKeys:
        return _page_keys(keys, req_context)

    def touch_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Marks a request's pages as used, from the first block on, wherever they were found."""
        place = _place(req_context)
        if self._store is not None:
            self._store.touch(place.namespace, list(keys), place.used_at)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        wanted: list[OffloadKey] = []
        if self._store is not None and self._store.takes_pages():
            shelf = self._store.shelf(_place(req_context).namespace)
            wanted = [key for key in keys if key not in self._writing and shelf.lacks(key)]
            self._writing.update(wanted)
            if shelf.outbox is not None:
                shelf.outbox.announce(wanted)
        return PrepareStoreOutput(wanted, _page_keys(wanted, req_context), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._writing.difference_update(keys)
        if self._store is not None and self._store.outbox is not None:
            self._store.outbox.settle(keys)

    def request_ends(self, keys: Sequence[OffloadKey]) -> None:
        """A request's last pages are about to be stored: peers that ask for them now wait.

        vLLM hands out the request's answer before the step that stores its last pages.
        """
        if self._store is not None and (outbox := self._store.outbox) is not None:
            outbox.announce(keys)
            self._ending.append(keys)

    def stores_prepared(self) -> None:
        """Of requests that ended, pages are announced by `prepare_store` now, or never will be."""
        for keys in self._ending:
            if self._store is not None and (outbox := self._store.outbox) is not None:
                outbox.settle(keys)
        self._ending.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        changes = None if self._store is None else self._store.take_changes()
        return None if changes is None else transfer_stats(changes)


def _place(req_context: ReqContext) -> RequestPlace:
    return req_context.get_state(RequestPlace) or _NOT_KEPT


def _at_peer(key: OffloadKey, place: RequestPlace) -> bool:
    return place.asked is not None and place.asked.peer_of(key) is not None


def _engine_id(params: Mapping[str, Any] | None) -> str | None:
    """The engine that a proxy had compute the prompt."""
    engine_id = (params or {}).get("remote_engine_id")
    return engine_id if isinstance(engine_id, str) else None


def _page_keys(keys: Collection[OffloadKey], req_context: ReqContext) -> PageKeys:
    ends = [req_context.get_offload_key_position(key) or 0 for key in keys]
    return PageKeys(list(keys), ends, _place(req_context))
