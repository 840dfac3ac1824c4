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

#: A request whose loads failed so often computes. Each failure took a bad page out of its store, or
#: the machine cannot open files now.
MAX_FAILED_LOADS = 3


@dataclass
class _Request:
    """What is known of a request; one that was not announced is kept nowhere."""

    namespace: str | None = None  # whose pages are its own, see `salts.namespace`
    used_at: float = 0.0  # seconds since the epoch: when it came
    lookups: dict[str, Lookup] = field(default_factory=dict)  # by store, of those that were asked
    failed_loads: int = 0


class PageManager(OffloadingManager):
    """Answers vLLM's offloading scheduler from views of the worker's stores.

    A page that is on its way to a store is a miss: its request computes it again rather than wait.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: seconds since the epoch.
        """
        self._clock = clock
        self._salt_key: bytes | None = None
        self._views: Mapping[str, View] = {}  # by store, until the worker has said what is there
        self._salts: dict[str, str | None] = {}  # by request id, of requests about to be announced
        self._writing: set[OffloadKey] = set()
        #: Whether the worker must say what its pages are before stores are asked for any.
        self.asks_content = False
        self._discards: dict[int, Discard] = {}  # by number; the pages may still be there
        self._num_discards = 0
        self._untold_discards: list[Discard] = []
        self._untold_uses: list[Use] = []
        self._figures: dict[str, Any] = {}  # last told

    def open(self, views: Mapping[str, View], salt_key: bytes | None) -> None:
        """The worker has stores; nothing is found before.

        Args:
            views: of them, by name, in the order that they are read in.
            salt_key: see `salts.namespace`.
        """
        self._views = views
        self._salt_key = salt_key

    @property
    def is_open(self) -> bool:
        """Whether the worker has said which stores there are."""
        return bool(self._views)

    @property
    def is_idle(self) -> bool:
        """Whether no page is on its way to a store, and no request is about to be announced."""
        return not self._writing and not self._salts

    def note_salt(self, req_id: str, salt: str | None) -> None:
        """Called before `on_new_request`, which is not told of a request's cache_salt."""
        self._salts[req_id] = salt

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.req_id in self._salts:
            salt = self._salts.pop(req_context.req_id)
            namespace = salts.namespace(self._salt_key, salt)
            req_context.set_state(_Request(namespace, self._clock()))
        return RequestOffloadingContext()

    def stores_have_answered(
        self, keys: Callable[[], Sequence[OffloadKey]], req_context: ReqContext
    ) -> bool:
        """Whether all stores have said what they have of a request; asks them first.

        Args:
            keys: gives those of the pages that it could use.
            req_context: the request's.
        """
        request = _of(req_context)
        if self.asks_content and self._views:
            return False
        for name, view in self._views.items():
            if name not in request.lookups:
                params = req_context.kv_transfer_params
                request.lookups[name] = view.look_up(request.namespace, keys, params)
        return all(lookup.done for lookup in request.lookups.values())

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = _of(req_context)
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
        """A request's load failed. After some it computes all, or it might never begin."""
        self._release(req_context, failed=True)
        _of(req_context).failed_loads += 1

    def loads_nothing(self, req_context: ReqContext) -> None:
        """A request begins without pages from outside."""
        self._release(req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for lookup in _of(req_context).lookups.values():
            lookup.loaded()
        self._release(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._release(req_context)

    def _release(self, req_context: ReqContext, failed: bool = False) -> None:
        """Stores need not keep what they found for a request."""
        request = _of(req_context)
        released = {name: each.release(failed) for name, each in request.lookups.items()}
        request.lookups = {name: each for name, each in released.items() if each is not None}

    def touch_prefix(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Marks a request's pages as used, from the first block on, wherever they were found."""
        request = _of(req_context)
        if found := list[bytes](keys):
            self._untold_uses.append(Use(request.namespace, found, request.used_at))

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
        """Has the worker remove pages, which are not to be found from now on.

        Args:
            salt: of the request that they are of.
            keys: theirs.
        """
        namespace = salts.namespace(self._salt_key, salt)
        discard = Discard(self._num_discards, namespace, frozenset(keys))
        self._num_discards += 1
        self._discards[discard.number] = discard
        self._untold_discards.append(discard)

    def take_messages(self) -> tuple[list[Discard], list[Use]]:
        """What the worker has to hear since the last call."""
        told = self._untold_discards, self._untold_uses
        self._untold_discards, self._untold_uses = [], []
        return told

    def hear(self, news: TransferUpdate) -> None:
        """Takes what the worker tells."""
        if news.content is not None:
            self.asks_content = False
            for view in self._views.values():
                view.use(news.content)
        for name, told in news.stores.items():
            self._views[name].hear(told)
        for number in news.discarded:
            del self._discards[number]

    def computed(self, prefill_rows: int, prefill_seconds: float) -> None:
        """See `View.computed`."""
        for view in self._views.values():
            view.computed(prefill_rows, prefill_seconds)

    def figures(self) -> dict[str, dict[str, Any]]:
        """Figures of the views that are others than at the last call; see `StoreConfig`."""
        now = {view_of(name): view.figures() for name, view in self._views.items()}
        new = {
            whose: each
            for whose, each in now.items()
            if each is not None and each != self._figures.get(whose)
        }
        self._figures |= new
        return {whose: asdict(each) for whose, each in new.items()}

    def params_for_others(self, req_id: str) -> dict[str, Any] | None:
        """What a proxy hands to an engine that goes on with a request; None: nothing."""
        found = (view.params_for_others(req_id) for view in self._views.values())
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
    """What vLLM's offloading connector makes its scheduler's side from."""

    def get_manager(self) -> OffloadingManager:
        return PageManager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        raise NotImplementedError("MetalWorker moves blocks itself, by TransferHooks")
