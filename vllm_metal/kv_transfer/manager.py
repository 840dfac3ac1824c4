# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of the pages on disk: what is there, and what is worth writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

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

from vllm_metal.kv_transfer import salts
from vllm_metal.kv_transfer.messages import PageKeys, RequestPlace
from vllm_metal.kv_transfer.metrics import disk_stats

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.page_store import PageStore

_NOT_KEPT = RequestPlace(None, 0.0)


class DiskManager(OffloadingManager):
    """Answers vLLM's offloading scheduler from the index of a page store.

    A page that is on its way to the disk is a miss: its request computes it again rather than wait.
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

    def open(self, store: PageStore) -> None:
        """The worker's store; nothing is found before."""
        self._store = store

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

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        namespace = _place(req_context).namespace
        if self._store is None or namespace is None or key in self._writing:
            return LookupResult.MISS
        found = self._store.folder(namespace).contains(key)
        return LookupResult.HIT if found else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PageKeys:
        return _page_keys(keys, req_context)

    def touch_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Marks a request's pages as used, from the first block on, wherever they were found."""
        place = _place(req_context)
        if self._store is not None and place.namespace is not None:
            self._store.touch(place.namespace, list(keys), place.used_at)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        wanted: list[OffloadKey] = []
        namespace = _place(req_context).namespace
        if self._store is not None and namespace is not None and self._store.takes_pages():
            folder = self._store.folder(namespace)
            wanted = [key for key in keys if key not in self._writing and not folder.contains(key)]
            self._writing.update(wanted)
        return PrepareStoreOutput(wanted, _page_keys(wanted, req_context), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._writing.difference_update(keys)

    def reset_cache(self) -> None:
        """Leaves the disk alone: vLLM resets all caches when an engine goes to sleep, too.

        What is there stays right. It is found by the hash of the text, in a folder named after all
        that K/V depend on.
        """
        self._writing.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        changes = None if self._store is None else self._store.take_changes()
        return None if changes is None else disk_stats(changes)


def _place(req_context: ReqContext) -> RequestPlace:
    return req_context.get_state(RequestPlace) or _NOT_KEPT


def _page_keys(keys: Collection[OffloadKey], req_context: ReqContext) -> PageKeys:
    ends = [req_context.get_offload_key_position(key) or 0 for key in keys]
    return PageKeys(list(keys), ends, _place(req_context))
