# SPDX-License-Identifier: Apache-2.0
"""Keeps LoRA adapters by content digest and assigns them slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
from vllm.logger import init_logger

from vllm_metal.engine.lora.adapter import LowRank, read_adapter
from vllm_metal.engine.lora.files import AdapterError, AdapterFiles
from vllm_metal.engine.lora.names import on_modules
from vllm_metal.engine.lora.updates import Updates, max_cached
from vllm_metal.engine.lora.versions import AdapterRequest, of_content
from vllm_metal.engine.memory.planner import AdapterBytes

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest

logger = init_logger(__name__)


class Adapters:
    """The adapters of an engine, by digest of their files.

    --max-cpu-loras adapters are kept and --max-loras have a slot; both evict the least recently
    used. A slot is assigned when a step needs it.
    """

    def __init__(self, model: nn.Module, config: LoRAConfig, dtype: mx.Dtype) -> None:
        self._model, self._max_rank = model, int(config.max_lora_rank)
        self._num_slots = config.max_loras
        self._max_cached = max_cached(config)
        self.updates = Updates(model, self._num_slots, self._max_rank, dtype, config.target_modules)
        self._cached: OrderedDict[str, Mapping[str, LowRank]] = OrderedDict()
        self._slots: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._by_id: dict[int, str] = {}  # maps a client's adapter id to the digest
        self._pinned: set[int] = set()
        self.in_use: Collection[str] = ()  # digests that running requests may need

    @property
    def nbytes(self) -> AdapterBytes:
        """Memory of the slots and of the cached adapters, all at the largest rank."""
        return AdapterBytes(self.updates.nbytes, self._max_cached * self.updates.slot_bytes)

    def add(self, request: LoRARequest) -> bool:
        """Loads an adapter for a client; replaces one with the same id. Raises what `load` does."""
        version = of_content(request)
        self.load(version)
        self._by_id[version.asked_id] = version.digest
        return True

    def load(self, request: AdapterRequest) -> None:
        """Loads the adapter unless the same content is loaded already.

        Raises:
            LoRAAdapterNotFoundError, AdapterError: the adapter cannot be served, or its files
                changed since the request arrived.
        """
        if request.digest in self._cached:
            self._cached.move_to_end(request.digest)
            self._by_id.setdefault(request.asked_id, request.digest)
            return
        content = AdapterFiles.find(request.lora_name, request.lora_path).read()
        if content.digest != request.digest:
            raise AdapterError(
                request.lora_name,
                f"changed on disk ({request.lora_path}) since it was loaded or the request arrived"
                ": load it again",
            )
        updates = on_modules(read_adapter(content, self._max_rank), self._model)
        self._check(request.lora_name, updates)
        dtype = self.updates.dtype
        kept = {
            name: LowRank(update.a.astype(dtype), update.b.astype(dtype))
            for name, update in updates.items()
        }
        mx.eval([[update.a, update.b] for update in kept.values()])
        self._cached[request.digest] = kept
        self._by_id.setdefault(request.asked_id, request.digest)
        self._evict()
        logger.info("LoRA adapter %s: %d layers", request.lora_name, len(kept))

    def _check(self, name: str, updates: Mapping[str, LowRank]) -> None:
        for module, update in updates.items():
            layer = self.updates.layers.get(module)
            if layer is None:
                raise AdapterError(name, f"updates {module}, which does not support adapters")
            if not layer.fits(update):
                sizes, shapes = layer.sizes, f"{update.a.shape} and {update.b.shape}"
                experts = "" if sizes.num_experts is None else f", {sizes.num_experts} experts"
                raise AdapterError(
                    name,
                    f"has shapes {shapes} at {module}, whose weight is "
                    f"[{sizes.num_out}, {sizes.num_in}]{experts}",
                )

    def _evict(self) -> None:
        """Evicts adapters beyond the limit, except pinned ones and those that requests use."""
        needed = {*self.in_use, *self._pinned_digests()}
        for digest in [digest for digest in self._cached if digest not in needed]:
            if len(self._cached) <= self._max_cached:
                return
            if digest != next(reversed(self._cached)):  # not the one being loaded
                self._forget(digest)

    def _forget(self, digest: str) -> None:
        self._cached.pop(digest, None)
        for asked_id in [each for each, of_id in self._by_id.items() if of_id == digest]:
            del self._by_id[asked_id]

    def _pinned_digests(self) -> set[str]:
        return {self._by_id[asked_id] for asked_id in self._pinned if asked_id in self._by_id}

    def remove(self, asked_id: int) -> bool:
        """Removes a client's adapter if present; requests that use it keep it until they end."""
        self._pinned.discard(asked_id)
        digest = self._by_id.pop(asked_id, None)
        if digest is None:
            return False
        if digest not in self._by_id.values() and digest not in self.in_use:
            self._cached.pop(digest, None)
        return True

    def pin(self, asked_id: int) -> bool:
        """Pins a client's adapter in a slot.

        Raises ValueError: the adapter is not loaded, or no slot would be left for others.
        """
        if asked_id not in self._by_id:
            raise ValueError(f"LoRA adapter {asked_id} is not loaded: it cannot be pinned")
        if len(self._pinned_digests() | {self._by_id[asked_id]}) >= max(self._num_slots, 2):
            raise ValueError(
                f"LoRA adapter {asked_id} cannot be pinned: one of the {self._num_slots} slots "
                "must remain for other adapters. Raise --max-loras"
            )
        self._pinned.add(asked_id)
        self.activate({self._by_id[asked_id]})
        return True

    def ids(self) -> set[int]:
        """Clients' ids of loaded adapters."""
        return set(self._by_id)

    def activate(self, digests: Collection[str]) -> Mapping[str, int]:
        """Gives each adapter of a step a slot and returns all slots by digest.

        Raises RuntimeError: the step has more adapters than there are slots.
        """
        missing = []
        for digest in digests:
            if digest in self._slots:
                self._slots.move_to_end(digest)
            else:
                missing.append(digest)
        for digest in missing:
            slot = self._free_slot(digests)
            self.updates.write(slot, self._cached[digest])
            self._slots[digest] = slot
        return self._slots

    def _free_slot(self, needed: Collection[str]) -> int:
        taken = set(self._slots.values())  # slot 0 is all zeros, for requests without an adapter
        if free := [slot for slot in range(1, self._num_slots + 1) if slot not in taken]:
            return free[0]
        keep = {*needed, *self._pinned_digests()}
        oldest = next((digest for digest in self._slots if digest not in keep), None)
        if oldest is None:
            raise RuntimeError(
                f"a step has {len(needed)} adapters, and --max-loras is {self._num_slots}"
            )
        return self._slots.pop(oldest)
