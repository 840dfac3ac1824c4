# SPDX-License-Identifier: Apache-2.0
"""Moves blocks out of the pool and back around steps, as the scheduler's connector directs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput

from vllm_metal.engine.worker.step_hooks import HookedRunner, StepHooks
from vllm_metal.identity.fingerprint import Fingerprint, PoolContent
from vllm_metal.kv_transfer.load_jobs import PIECE_BYTES, LoadJobs
from vllm_metal.kv_transfer.messages import PageKeys, TransferMetadata, TransferUpdate
from vllm_metal.kv_transfer.page_store import PageStore
from vllm_metal.kv_transfer.store_jobs import BATCH_STEPS, StoreJobs

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_metal.kv_transfer.shared_pool import SharedPool
    from vllm_metal.patches.vllm_patches.step_result import Metrics

logger = init_logger(__name__)

#: Memory limit of outgoing copies, and of incoming pages: eight pieces each.
STAGING_BYTES = 64 << 20
#: Memory limit of outgoing copies if other engines wait for them (disaggregated prefill): the K/V
#: of a step of 2,048 tokens for an 8B model with 8 heads of 16-bit K/V.
STAGING_BYTES_WAITED_FOR = 256 << 20
#: Bytes put into the pool before a step while requests decode: one piece, which takes the host some
#: 3 ms, and its reader some 5 ms of a core. Otherwise all staged bytes.
IMPORT_BYTES_BESIDE = PIECE_BYTES
#: Pieces read ahead while requests decode, so that threads leave cores to decoding on the CPU.
PIECES_AHEAD_BESIDE = 2
#: Limit of bytes copied out for other engines with a step while requests decode: one piece.
#: Otherwise all that staging holds.
EXPORT_BYTES_BESIDE = PIECE_BYTES
#: More tokens than any request has, which means all of them.
_ALL_TOKENS = 1 << 30
#: Seconds that pending writes may take when the engine sleeps or ends.
DRAIN_SECONDS = 5.0


def staging_bytes(is_waited_for: bool) -> int:
    """Returns the staging memory limit; `is_waited_for`: other engines wait for pages."""
    return STAGING_BYTES + (STAGING_BYTES_WAITED_FOR if is_waited_for else STAGING_BYTES)


class TransferHooks(StepHooks):
    """Runs a step's store and load jobs, which end in some later step.

    Stores: a job's blocks are complete after the step that brings it. The next step copies them
    out, and a thread writes the copies once that step has been computed. Loads: threads read pages
    into staging memory, which are put into the pool before a step. Failed jobs end, too: pages that
    were not stored or loaded are computed again.
    """

    def __init__(
        self,
        store: PageStore,
        fingerprint: Callable[[], Fingerprint],
        block_size: int,
        is_waited_for: bool = False,
    ) -> None:
        """
        Args:
            fingerprint: returns the current fingerprint of pages; called for each pool, since
                other weights may have been loaded.
            block_size: tokens of a block.
            is_waited_for: whether other engines wait for this engine's pages.
        """
        self._fingerprint = fingerprint
        self.store = store
        self.store_jobs = StoreJobs(
            store,
            block_size,
            STAGING_BYTES_WAITED_FOR if is_waited_for else STAGING_BYTES,
            batch_steps=1 if is_waited_for else BATCH_STEPS,
        )
        self.load_jobs = LoadJobs(store, STAGING_BYTES)
        self._runner: HookedRunner | None = None
        self._metadata = TransferMetadata({}, {})
        self._expected: dict[int, list[bytes]] = {}  # pages of active store jobs
        self._pending_content: PoolContent | None = None  # to report to the scheduler
        self._has_tokens = False  # whether the current step computes; if not, the device is idle
        self._on_pool: set[str] = set()  # requests that began or resumed on this pool
        self._ended: set[str] = set()  # requests that had ended before the current step
        #: Keys of jobs for pages that peers want, by number; the scheduler does not know these.
        self._exports: dict[int, Collection[bytes]] = {}
        self._num_exports = 0

    def pool_made(self, runner: HookedRunner) -> None:
        pages = runner.layers.block_pages()
        content = PoolContent(self._fingerprint(), pages.sizes)
        is_first = self.store.content is None
        if self.store.use(content) and not is_first:  # the handshake reports the first one
            self._pending_content = content
        self.store_jobs.use(pages)
        self.load_jobs.use(pages)
        self._runner = runner

    def before_pool_goes(self, lost: bool) -> None:
        try:
            if not lost:
                if self._runner is not None:
                    self._runner.complete_draft_kv(self._draft_ends({}))
                self.store_jobs.drain(DRAIN_SECONDS)
        except Exception:
            logger.exception("Blocks could not be copied out of the KV pool before it is freed")
        self.store_jobs.drop_pool()
        self.load_jobs.drop_pool()
        if (shared := self.store.shared_pool) is not None:
            shared.clear()
        self._on_pool.clear()
        self._runner = None

    def before_step(self, scheduler_output: SchedulerOutput, pool_valid: bool) -> None:
        metadata = scheduler_output.kv_connector_metadata
        assert isinstance(metadata, TransferMetadata)
        self._metadata = metadata
        self._has_tokens = bool(scheduler_output.num_scheduled_tokens)
        self._update_store(metadata)
        self._ended = finished = scheduler_output.finished_req_ids
        self.load_jobs.cancel(metadata.cancelled_loads | finished)
        for job_id, job in metadata.load_jobs.items():
            self.load_jobs.add(job_id, job.req_id, *_pages(job, job.src_spec, job.dst_spec))
        self._read_on()
        if not pool_valid:
            return
        self._on_pool.update(new.req_id for new in scheduler_output.scheduled_new_reqs)
        self._on_pool |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self.store_jobs.drop_urgent()
        self._flush(metadata)
        if (shared := self.store.shared_pool) is not None:
            shared.begin_step(metadata.cached)
            self._export(shared)

    def _update_store(self, metadata: TransferMetadata) -> None:
        """Passes invalidations, uses and expected pages of a step to the stores."""
        # Drop by key, too: other requests with the same blocks lose them, as this step may clear
        # them.
        self.store_jobs.drop_requests(metadata.invalid_requests)
        for discard in metadata.discards:
            self.store_jobs.drop_keys(discard.keys)
            self.store.discard(discard)
        for use in metadata.uses:
            self.store.touch(use)
        if metadata.needs_content:
            self._pending_content = self.store.content
        for job_id, job in metadata.store_jobs.items():
            assert isinstance(job.dst_spec, PageKeys)
            self._expected[job_id] = job.dst_spec.keys
            self.store.expect(job.dst_spec.keys)

    def _flush(self, metadata: TransferMetadata) -> None:
        """Copies out blocks at once that this step reassigns to other requests."""
        flushed = metadata.jobs_to_flush or set()
        for job_id in flushed & metadata.store_jobs.keys():
            self._add_store(job_id, metadata.store_jobs.pop(job_id))
        if flushed:
            assert self._runner is not None
            ends = self.store_jobs.all_due_ends(flushed)
            self._runner.complete_draft_kv(self._draft_ends(ends))
            self.store_jobs.copy_now(flushed)

    def _export(self, shared: SharedPool) -> None:
        most_bytes = EXPORT_BYTES_BESIDE if self._has_tokens else STAGING_BYTES
        room = self.store_jobs.room(most_bytes)
        if wanted := shared.take(self.store_jobs.page_bytes, room):
            self._num_exports += 1
            number = -self._num_exports  # negative, as the scheduler's jobs count up from 0
            self._exports[number] = wanted.keys()
            self.store_jobs.add_urgent(number, wanted)

    def _draft_ends(self, ends: dict[str, int]) -> dict[str, int]:
        """Returns how far each request's draft K/V must be complete before blocks are copied.

        `ends` has those positions for stores, by request id.
        """
        # A page wanted by peers may be in a block of any request on this pool.
        return ends | dict.fromkeys(self._on_pool, _ALL_TOKENS) if self._exports else ends

    def _add_store(self, job_id: int, job: TransferJob) -> None:
        # A request that ended before this pool was made left nothing in its blocks.
        if job.req_id in self._metadata.invalid_requests or job.req_id not in self._on_pool:
            self.store_jobs.refuse(job_id, job.req_id)
            return
        keys, blocks = _pages(job, job.dst_spec, job.src_spec)
        self.store_jobs.add(job_id, job.req_id, keys, blocks)

    def before_forward(self) -> None:
        self.load_jobs.import_ready(IMPORT_BYTES_BESIDE if self._has_tokens else STAGING_BYTES)
        self._read_on()

    def _read_on(self) -> None:
        self.load_jobs.start_reads(PIECES_AHEAD_BESIDE if self._has_tokens else None)

    def before_submit(self) -> None:
        assert self._runner is not None
        self._runner.complete_draft_kv(self._draft_ends(self.store_jobs.due_ends()))
        self._runner.join_step(self.store_jobs.queue_batch())

    def after_step(self, computed: bool) -> KVConnectorOutput | None:
        metadata = self._metadata
        if computed and self._has_tokens:
            self.store_jobs.step_submitted()
        for job_id, job in metadata.store_jobs.items():
            if computed:
                self._add_store(job_id, job)
            else:
                self.store_jobs.refuse(job_id, job.req_id)
        self._metadata = TransferMetadata({}, {})
        self.store_jobs.end_step()
        self._on_pool -= self._ended
        if computed and not self._has_tokens:
            assert self._runner is not None
            self._runner.complete_draft_kv(self._draft_ends(self.store_jobs.all_due_ends()))
            self.store_jobs.copy_now()  # the device is idle otherwise
        outcome = self._results()
        if (shared := self.store.shared_pool) is not None and shared.is_waited_for:
            shared.wake_event.set()  # for pages requested meanwhile, or without room
        return outcome

    def steps_computed(self, num_left: int) -> None:
        self.store_jobs.steps_computed(num_left)

    def _results(self) -> KVConnectorOutput | None:
        update = TransferUpdate()
        loaded = self.load_jobs.finished()
        for store in self.store_jobs.finished():
            if store.job_id in self._exports:
                assert self.store.shared_pool is not None
                self.store.shared_pool.ended(self._exports.pop(store.job_id))
                continue
            self.store.expect_no_more(self._expected.pop(store.job_id))
            update.mark_completed(store.job_id)
            if store.num_bytes:
                update.transfer_stats.store.record(store.num_bytes, store.seconds)
        for load in loaded:
            update.mark_completed(load.job_id)
            if load.num_bytes:
                update.transfer_stats.load.record(load.num_bytes, load.seconds)
        in_part = {load.req_id for load in loaded if load.missing_blocks}
        update.partially_loaded = in_part
        self.store.add_messages(update)
        update.content, self._pending_content = self._pending_content, None
        if update == TransferUpdate():
            return None
        return KVConnectorOutput(
            finished_recving={load.req_id for load in loaded},
            failed_recving={load.req_id for load in loaded if load.failed} - in_part,
            invalid_block_ids={block for load in loaded for block in load.missing_blocks},
            kv_connector_worker_meta=update,
        )

    def metrics(self) -> Metrics:
        return self.store.metrics()

    def close(self) -> None:
        """Ends the threads, after the pool is gone."""
        self.load_jobs.close()
        self.store.close()


def _pages(job: TransferJob, keys: object, blocks: object) -> tuple[PageKeys, Iterable[int]]:
    assert isinstance(keys, PageKeys) and isinstance(blocks, GPULoadStoreSpec)
    return keys, blocks.block_ids.tolist()
