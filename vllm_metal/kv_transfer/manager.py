# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the KV connector: which blocks disk and peers have, and which to store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.kv_transfer.messages import Discard, PageKeys, TransferUpdate, Use
from vllm_metal.kv_transfer.store import Lookup, View, view_of
from vllm_metal.settings import salts

#: A request with this many failed loads computes instead. Each failure removed a bad page from its
#: store, or the machine cannot open files now.
MAX_FAILED_LOADS = 3


@dataclass
class _Request:
    """State of a request. The defaults, for requests without `on_new_request`, store nothing."""

    namespace: str | None = None  # see `salts.namespace`
    used_at: float = 0.0  # arrival, seconds since the epoch
    lookups: dict[str, Lookup] = field(default_factory=dict)  # by store
    failed_loads: int = 0


class PageManager(OffloadingManager):
    """Answers vLLM's offloading scheduler from views of the worker's stores."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch."""
        self._clock = clock
        self._salt_key: bytes | None = None
        self._views: Mapping[str, View] = {}  # by store; empty until the worker's handshake
        self._salts: dict[str, str | None] = {}  # by request id, until `on_new_request`
        self._writing: set[OffloadKey] = set()
        #: Whether the worker must report its content before stores are asked for pages.
        self.needs_content = False
        self._discards: dict[int, Discard] = {}  # by number; their pages may still exist
        self._num_discards = 0
        self._pending_discards: list[Discard] = []
        self._pending_uses: list[Use] = []
        self._metrics: dict[str, Any] = {}  # as last reported

    def open(self, views: Mapping[str, View], salt_key: bytes | None) -> None:
        """Sets the stores' views by name, in reading order. Before that, lookups find nothing."""
        self._views = views
        self._salt_key = salt_key

    @property
    def is_open(self) -> bool:
        """Whether the worker has reported its stores."""
        return bool(self._views)

    @property
    def is_idle(self) -> bool:
        """Whether no page is being stored, and no noted salt awaits `on_new_request`."""
        return not self._writing and not self._salts

    def note_salt(self, req_id: str, salt: str | None) -> None:
        """Notes a request's cache_salt before `on_new_request`, which does not get it."""
        self._salts[req_id] = salt

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.req_id in self._salts:
            salt = self._salts.pop(req_context.req_id)
            namespace = salts.namespace(self._salt_key, salt)
            req_context.set_state(_Request(namespace, self._clock()))
        return RequestOffloadingContext()

    def lookups_done(
        self, keys: Callable[[], Sequence[OffloadKey]], req_context: ReqContext
    ) -> bool:
        """Returns whether all stores have answered a request's lookups; the first call starts them.

        `keys` returns the pages that the request could use.
        """
        request = _of(req_context)
        if self.needs_content and self._views:
            return False
        for name, view in self._views.items():
            if name not in request.lookups:
                params = req_context.kv_transfer_params
                request.lookups[name] = view.look_up(request.namespace, keys, params)
        return all(lookup.done for lookup in request.lookups.values())

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = _of(req_context)
        # A page that is being stored is a miss: computing it again is better than waiting.
        if key in self._writing or request.failed_loads >= MAX_FAILED_LOADS:
            return LookupResult.MISS
        discards = self._discards.values()
        if any(request.namespace == each.namespace and key in each.keys for each in discards):
            return LookupResult.MISS
        found = any(lookup.contains(key) for lookup in request.lookups.values())
        return LookupResult.HIT if found else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        for name, lookup in _of(req_context).lookups.items():
            if lookup.contains(key):
                return self._views[name].source
        return CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PageKeys:
        wanted = list(keys)
        found = {name: each.hint(wanted) for name, each in _of(req_context).lookups.items()}
        hints = {name: hint for name, hint in found.items() if hint is not None}
        return _page_keys(keys, req_context, hints)

    def load_failed(self, req_context: ReqContext) -> None:
        """Counts a failed load. After MAX_FAILED_LOADS, the request computes instead of loading."""
        self._release(req_context, failed=True)
        _of(req_context).failed_loads += 1

    def release_lookups(self, req_context: ReqContext) -> None:
        """Releases the lookups of a request that begins without stored pages."""
        self._release(req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for lookup in _of(req_context).lookups.values():
            lookup.loaded()
        self._release(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._release(req_context)

    def _release(self, req_context: ReqContext, failed: bool = False) -> None:
        request = _of(req_context)
        released = {name: each.release(failed) for name, each in request.lookups.items()}
        request.lookups = {name: each for name, each in released.items() if each is not None}

    def touch_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Marks a request's leading pages as used, in all stores."""
        request = _of(req_context)
        if found := list[bytes](keys):
            self._pending_uses.append(Use(request.namespace, found, request.used_at))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        namespace = _of(req_context).namespace
        wanted = [
            key
            for key in keys
            if key not in self._writing
            and any(view.wants(namespace, key) for view in self._views.values())
        ]
        self._writing.update(wanted)
        return PrepareStoreOutput(wanted, _page_keys(wanted, req_context, {}), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._writing.difference_update(keys)

    def discard(self, salt: str | None, keys: Iterable[bytes]) -> None:
        """Makes the worker remove pages of a request with this salt; lookups miss them at once."""
        namespace = salts.namespace(self._salt_key, salt)
        discard = Discard(self._num_discards, namespace, frozenset(keys))
        self._num_discards += 1
        self._discards[discard.number] = discard
        self._pending_discards.append(discard)

    def take_messages(self) -> tuple[list[Discard], list[Use]]:
        """Returns messages for the worker since the last call."""
        messages = self._pending_discards, self._pending_uses
        self._pending_discards, self._pending_uses = [], []
        return messages

    def update(self, update: TransferUpdate) -> None:
        if update.content is not None:
            self.needs_content = False
            for view in self._views.values():
                view.use(update.content)
        for name, message in update.stores.items():
            self._views[name].update(message)
        for number in update.discarded:
            del self._discards[number]

    def computed(self, prefill_rows: int, prefill_seconds: float) -> None:
        """Passes prefilled tokens, and the seconds that they took, to the stores' views."""
        for view in self._views.values():
            view.computed(prefill_rows, prefill_seconds)

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Returns, by source, the views' metrics that changed since the last call."""
        now = {view_of(name): view.metrics() for name, view in self._views.items()}
        new = {
            whose: each
            for whose, each in now.items()
            if each is not None and each != self._metrics.get(whose)
        }
        self._metrics |= new
        return {whose: asdict(each) for whose, each in new.items()}

    def kv_transfer_params(self, req_id: str) -> dict[str, Any] | None:
        """Returns kv_transfer_params for the engine that continues a request; None without any."""
        found = (view.kv_transfer_params(req_id) for view in self._views.values())
        return next((params for params in found if params is not None), None)

    def shutdown(self) -> None:
        for view in self._views.values():
            view.close()


def _of(req_context: ReqContext) -> _Request:
    found = req_context.get_state(_Request)
    if found is None:
        found = _Request()
        req_context.set_state(found)
    return found


def _page_keys(
    keys: Collection[OffloadKey], req_context: ReqContext, hints: Mapping[str, Any]
) -> PageKeys:
    ends = [req_context.get_offload_key_position(key) or 0 for key in keys]
    request = _of(req_context)
    return PageKeys(list(keys), ends, request.namespace, request.used_at, hints)


class MetalOffloadingSpec(OffloadingSpec):
    """Makes vLLM's offloading connector use `PageManager`."""

    def get_manager(self) -> OffloadingManager:
        return PageManager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError("MetalWorker moves blocks itself, by TransferHooks")
