# SPDX-License-Identifier: Apache-2.0
"""KV connector of vLLM's scheduler; the worker's side is `transfer_hooks.py`."""

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
from vllm_metal.metrics.figures import STEP
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
    from vllm_metal.patches.vllm_patches.step_result import Figures

#: Seconds that a request which starts again waits for its blocks to be written; then it computes.
LONGEST_WAIT = 1.0

OffloadingSpecFactory.register_spec(SPEC, "vllm_metal.kv_transfer.manager", SPEC)


class MetalKVConnector(OffloadingConnector):
    """vLLM's offloading scheduler over stores of pages, one page for each block of a group.

    vLLM decides which blocks are stored and loaded, and follows each job. This class adds whose
    pages a request may see, and what failures take back.
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
        self._waiting_since: dict[str, float] = {}  # by request id, for writes of its own
        self._bell: WakeEvent | None = None  # rung where others want pages of the pool
        self._cached: CachedBlocks | None = None  # what others may have of the pool
        self.pins: Pins | None = None

    @property
    def _manager(self) -> PageManager:
        manager = self.scheduler.manager
        assert isinstance(manager, PageManager)
        return manager

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        if self._manager.is_open:  # the engine woke up: its stores and their peers are as before
            return
        (handshake,) = metadata.values()
        config = self._config
        assert config is not None and isinstance(handshake, TransferHandshake)
        views = {
            name: store.view(config.engine_id, handshake.content, handshake.stores[name])
            for name, store in config.stores.items()
        }
        self._manager.open(views, config.read_salt_key())

        self._bell = handshake.bell

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        config = self._config
        if config is not None and any(each.shares_pool for each in config.stores.values()):
            self._cached = CachedBlocks(gpu_block_pool)
            self.pins = Pins(gpu_block_pool)

    def wake_by(self, wake: Callable[[], bool]) -> None:
        """Takes how an engine that is idle is made to look for work: see `engine_wake`."""
        if self._bell is not None:
            self._bell.connect(wake)

    def has_pending_push_work(self) -> bool:
        rung = self._bell is not None and self._bell.is_rung
        return rung or super().has_pending_push_work()

    def on_new_request(self, request: Request) -> None:
        self._manager.note_salt(request.request_id, request.cache_salt)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # A request that starts again has all its blocks offered again, as in vLLM 0.33: they may
        # have been refused as the pool was lost, or their files removed as they were bad.
        status = self.scheduler._req_status[request.request_id]
        for group in status.group_states:
            group.next_stored_chunk_idx = 0
        keys = partial(self._usable_keys, request, num_computed_tokens)
        if not self._manager.stores_have_answered(keys, status.req_context):
            return None, False
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0] is not None or not status.transfer_jobs:
            self._waiting_since.pop(request.request_id, None)
            return found
        # Blocks of its run before are still being written. A store that hangs must not hang it.
        now = self._clock()
        since = self._waiting_since.setdefault(request.request_id, now)
        return (0, False) if now - since > LONGEST_WAIT else found

    def _usable_keys(self, request: Request, num_computed_tokens: int) -> list[OffloadKey]:
        """Pages that a request could begin with, beyond what the pool has.

        Whole blocks only, and never the last token: it is computed, for its logits are wanted.
        """
        if request.skip_reading_prefix_cache:
            return []
        keys = []
        for group in self.scheduler.config.kv_group_configs:
            first = num_computed_tokens // group.tokens_per_block
            if (window := group.load_window_size_in_chunks(num_computed_tokens)) is not None:
                first = max(0, first - window)  # what a window reaches back to may be gone
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
            self._manager.loads_nothing(status.req_context)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._bell is not None:
            self._bell.silence()
        # The next turn of a session comes as a new request, with all the blocks that it has. vLLM
        # would put them behind those it knows of.
        for new in scheduler_output.scheduled_new_reqs:
            self.blocks_given_up(new.req_id)
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
            self._manager.asks_content,
            self._cached_now(scheduler_output),
        )
        self._void, self._cancelled = set(), set()
        return metadata

    def _cached_now(self, scheduler_output: SchedulerOutput) -> CacheChanges | None:
        """What the step at hand changes of the blocks that others may have."""
        if self._cached is None or self.pins is None:
            return None
        nobody_runs = not scheduler_output.num_scheduled_tokens and self.scheduler._req_status
        if nobody_runs or scheduler_output.preempted_req_ids:
            self.pins.release_all()  # a request may wait for these very blocks
        else:
            self.pins.make_way()
        return self._cached.take()

    def let_go_of_pins(self) -> None:
        """Gives back the blocks that are kept for other engines."""
        if self.pins is not None:
            self.pins.release_all()

    def _without_loading(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Less the requests that count as preempted and are being loaded already.

        A reset preempts what runs; the step after it may load these requests. vLLM takes a
        preempted request's transfers for stores, and asserts that they are.
        """
        loading = {job.req_id for job in self.scheduler._current_batch_load_jobs.values()}
        preempted = scheduler_output.preempted_req_ids or set()
        if loading.isdisjoint(preempted):
            return scheduler_output
        return replace(scheduler_output, preempted_req_ids=preempted - loading)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(news := connector_output.kv_connector_worker_meta, TransferUpdate):
            self._manager.hear(news)
            for req_id in news.loaded_in_part:
                self._load_failed(req_id)
            if news.pins is not None and self.pins is not None:
                self.pins.change(news.pins)
        for req_id in connector_output.failed_recving or ():
            self._load_failed(req_id)
        super().update_connector_output(connector_output)

    def _load_failed(self, req_id: str) -> None:
        if (status := self.scheduler._req_status.get(req_id)) is not None:
            self._manager.load_failed(status.req_context)
            for group in status.group_states:
                group.next_stored_chunk_idx = 0  # what it computes in place of pages is kept, too

    def figures_after(self, figures: Figures) -> Figures:
        """Takes a step's figures, as stores may want how fast prompts are computed.

        Returns:
            Figures of the stores' views that are others than before.
        """
        step = figures.get(STEP, {})
        if (rows := step.get("prefill_rows")) is not None:
            self._manager.computed(rows, step["prefill_seconds"])
        return self._manager.figures()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._waiting_since.pop(request.request_id, None)
        keeps, _ = super().request_finished_all_groups(request, block_ids)
        if not request.kv_transfer_params:
            return keeps, None
        return keeps, self._manager.params_for_others(request.request_id)

    def reset_cache(self) -> bool:
        """Leaves the stores alone: vLLM resets all caches when an engine goes to sleep, too.

        What is there stays right. It is found by the hash of the text, among pages of all that K/V
        depend on; the worker is asked what that is, for an engine may wake up with other weights.
        Jobs go on and are reported; vLLM's own reset forgets them, and may not be called twice
        while one of them goes on.
        """
        self._manager.asks_content = True
        return True

    def cancel_loads(self, req_ids: Iterable[str]) -> None:
        """Requests lose their blocks while these are being loaded; told to the worker next."""
        self._cancelled.update(req_ids)

    def blocks_given_up(self, req_id: str) -> None:
        """A request holds none of the blocks that it was known to have."""
        if (status := self.scheduler._req_status.get(req_id)) is not None:
            for group in status.group_states:
                group.block_ids.clear()

    def requests_failed(self, requests: Iterable[Request]) -> None:
        """Takes back all that was kept of requests whose numbers are not sound."""
        self.let_go_of_pins()  # or what holds their numbers would not be cleared
        groups = [group.group_idx for group in self.scheduler.config.kv_group_configs]
        for request in requests:
            self._void.add(request.request_id)
            hashes = request.block_hashes
            keys = [make_offload_key(each, group) for group in groups for each in hashes]
            self._manager.discard(request.cache_salt, keys)
