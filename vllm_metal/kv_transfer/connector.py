# SPDX-License-Identifier: Apache-2.0
"""KV connector of vLLM's scheduler; `transfer_hooks.py` is the worker's side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from vllm_metal.kv_transfer.config import SPEC, TransferConfig
from vllm_metal.kv_transfer.manager import PageManager
from vllm_metal.kv_transfer.messages import TransferHandshake, TransferMetadata, TransferUpdate
from vllm_metal.kv_transfer.pins import Pins
from vllm_metal.metrics.step_metrics import STEP
from vllm_metal.patches.vllm_patches.cached_blocks import CachedBlocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_metal.kv_transfer.wake_event import WakeEvent
    from vllm_metal.patches.vllm_patches.cached_blocks import CacheChanges
    from vllm_metal.patches.vllm_patches.step_result import Metrics

#: Seconds that a restarted request waits until its blocks are written; then it computes.
LONGEST_WAIT = 1.0

OffloadingSpecFactory.register_spec(SPEC, "vllm_metal.kv_transfer.manager", SPEC)


class MetalKVConnector(OffloadingConnector):
    """Runs vLLM's offloading scheduler on stores that hold one page per block and group.

    vLLM decides what to store and load, and tracks jobs. This class adds namespaces, and
    discards pages that failed requests have stored.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if role is not KVConnectorRole.SCHEDULER:
            raise NotImplementedError("MetalWorker moves blocks itself, by TransferHooks")
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = TransferConfig.of(vllm_config)
        self._void: set[str] = set()
        self._cancelled: set[str] = set()
        self._clock = time.monotonic
        self._waiting_since: dict[str, float] = {}  # by request id, while its pages are written
        self._wake_event: WakeEvent | None = None  # set when peers want pages of the pool
        self._cached: CachedBlocks | None = None  # blocks that peers may have
        self.pins: Pins | None = None

    @property
    def _manager(self) -> PageManager:
        manager = self.scheduler.manager
        assert isinstance(manager, PageManager)
        return manager

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        if self._manager.is_open:  # the engine woke up: its stores and their peers are unchanged
            return
        (handshake,) = metadata.values()
        config = self._config
        assert config is not None and isinstance(handshake, TransferHandshake)
        views = {
            name: store.view(config.engine_id, handshake.content, handshake.stores[name])
            for name, store in config.stores.items()
        }
        self._manager.open(views, config.read_salt_key())
        self._wake_event = handshake.wake_event

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        config = self._config
        if config is not None and any(each.shares_pool for each in config.stores.values()):
            self._cached = CachedBlocks(gpu_block_pool)
            self.pins = Pins(gpu_block_pool)

    def wake_by(self, wake: Callable[[], bool]) -> None:
        """Sets the function that makes an idle engine check for work; see `engine_wake`."""
        if self._wake_event is not None:
            self._wake_event.connect(wake)

    def has_pending_push_work(self) -> bool:
        is_set = self._wake_event is not None and self._wake_event.is_set
        return is_set or super().has_pending_push_work()

    def on_new_request(self, request: Request) -> None:
        self._manager.note_salt(request.request_id, request.cache_salt)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # Offer all blocks of a restarted request again, as vLLM 0.33 does: they may have been
        # refused because the pool was lost, or their files removed because they were bad.
        status = self.scheduler._req_status[request.request_id]
        for group in status.group_states:
            group.next_stored_chunk_idx = 0
        keys = partial(self._usable_keys, request, num_computed_tokens)
        if not self._manager.lookups_done(keys, status.req_context):
            return None, False
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is not None or not status.transfer_jobs:
            self._waiting_since.pop(request.request_id, None)
            return found
        # Blocks of the previous run are still being written. A store that hangs must not block it.
        now = self._clock()
        since = self._waiting_since.setdefault(request.request_id, now)
        return (0, False) if now - since > LONGEST_WAIT else found

    def _usable_keys(self, request: Request, num_computed_tokens: int) -> list[OffloadKey]:
        """Returns the pages that a request could load beyond the pool's."""
        if request.skip_reading_prefix_cache:
            return []
        keys = []
        for group in self.scheduler.config.kv_group_configs:
            first = num_computed_tokens // group.tokens_per_block
            if (window := group.load_window_size_in_chunks(num_computed_tokens)) is not None:
                first = max(0, first - window)  # the pool may have lost blocks of the window
            # Only whole blocks, and never the last token: it is computed for its logits.
            last = (request.num_tokens - 1) // group.tokens_per_block
            hashes = request.block_hashes[first:last]
            keys += [make_offload_key(each, group.group_idx) for each in hashes]
        return keys

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        status = self.scheduler._req_status[request.request_id]
        for group in status.group_states:
            self._manager.touch_prefix(group.offload_keys, status.req_context)
        if num_external_tokens == 0:
            self._manager.release_lookups(status.req_context)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._wake_event is not None:
            self._wake_event.clear()
        # A session's next turn arrives as a new request with all its blocks, which vLLM would
        # append to those that it knows.
        for new in scheduler_output.scheduled_new_reqs:
            self.forget_blocks(new.req_id)
        jobs: Any = super().build_connector_meta(self._without_loading(scheduler_output))
        discards, uses = self._manager.take_messages()
        metadata = TransferMetadata(
            jobs.load_jobs,
            jobs.store_jobs,
            jobs.jobs_to_flush,
            frozenset(self._void),
            frozenset(self._cancelled),
            discards,
            uses,
            self._manager.needs_content,
            self._cached_now(scheduler_output),
        )
        self._void, self._cancelled = set(), set()
        return metadata

    def _cached_now(self, scheduler_output: SchedulerOutput) -> CacheChanges | None:
        if self._cached is None or self.pins is None:
            return None
        nobody_runs = not scheduler_output.num_scheduled_tokens and self.scheduler._req_status
        if nobody_runs or scheduler_output.preempted_req_ids:
            self.pins.release_all()  # a request may wait for these very blocks
        else:
            self.pins.free_excess()
        return self._cached.take()

    def release_pins(self) -> None:
        """Unpins the blocks that are kept for other engines."""
        if self.pins is not None:
            self.pins.release_all()

    def _without_loading(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Removes preempted requests that are already loading again."""
        # A reset preempts running requests, and the next step may load them. vLLM asserts that a
        # preempted request's transfers are stores.
        loading = {job.req_id for job in self.scheduler._current_batch_load_jobs.values()}
        preempted = scheduler_output.preempted_req_ids or set()
        if loading.isdisjoint(preempted):
            return scheduler_output
        return replace(scheduler_output, preempted_req_ids=preempted - loading)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(update := connector_output.kv_connector_worker_meta, TransferUpdate):
            self._manager.update(update)
            for req_id in update.partially_loaded:
                self._load_failed(req_id)
            if update.pins is not None and self.pins is not None:
                self.pins.change(update.pins)
        for req_id in connector_output.failed_recving or ():
            self._load_failed(req_id)
        super().update_connector_output(connector_output)

    def _load_failed(self, req_id: str) -> None:
        if (status := self.scheduler._req_status.get(req_id)) is not None:
            self._manager.load_failed(status.req_context)
            for group in status.group_states:
                group.next_stored_chunk_idx = 0  # store what it now computes instead of loading

    def metrics_after(self, metrics: Metrics) -> Metrics:
        """Takes in a step's prefill speed; returns the manager's metrics since the last call."""
        step = metrics.get(STEP, {})
        if (rows := step.get("prefill_rows")) is not None:
            self._manager.computed(rows, step["prefill_seconds"])
        return self._manager.metrics()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._waiting_since.pop(request.request_id, None)
        keeps, _ = super().request_finished_all_groups(request, block_ids)
        if not request.kv_transfer_params:
            return keeps, None
        return keeps, self._manager.kv_transfer_params(request.request_id)

    def reset_cache(self) -> bool:
        """Removes no stored page, as vLLM also resets all caches when an engine goes to sleep."""
        # Stored pages remain valid: their keys are hashes of the text, per content. The worker must
        # report its content, as an engine may wake up with other weights. Jobs continue and are
        # reported; vLLM's own reset forgets them, and must not be called again while one is active.
        self._manager.needs_content = True
        return True

    def cancel_loads(self, req_ids: Iterable[str]) -> None:
        """Makes the next step cancel the loads of these requests, which lose their blocks."""
        self._cancelled.update(req_ids)

    def forget_blocks(self, req_id: str) -> None:
        """Forgets the blocks of a request, which it no longer holds."""
        if (status := self.scheduler._req_status.get(req_id)) is not None:
            for group in status.group_states:
                group.block_ids.clear()

    def requests_failed(self, requests: Iterable[Request]) -> None:
        """Discards all stored pages of requests with invalid results."""
        self.release_pins()  # or pinned blocks with invalid values would not be cleared
        groups = [group.group_idx for group in self.scheduler.config.kv_group_configs]
        for request in requests:
            self._void.add(request.request_id)
            hashes = request.block_hashes
            keys = [make_offload_key(each, group) for group in groups for each in hashes]
            self._manager.discard(request.cache_salt, keys)
