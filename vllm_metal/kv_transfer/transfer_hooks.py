# SPDX-License-Identifier: Apache-2.0
"""Moves blocks out of the pool and back around steps, as the scheduler's connector asks."""

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
from vllm_metal.kv_transfer.store_jobs import LOT_STEPS, StoreJobs

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_metal.kv_transfer.shared_pool import SharedPool
    from vllm_metal.patches.vllm_patches.step_result import Figures

logger = init_logger(__name__)

#: Most memory of copies on their way out, and of pages on their way in: eight pieces of each.
STAGING_BYTES = 64 << 20
#: Copies on their way out of an engine that prefills for others, who wait for them: what a step of
#: 2,048 tokens leaves of an 8B model with 16-bit K/V of 8 heads.
STAGING_BYTES_WAITED_FOR = 256 << 20
#: Bytes put into the pool before a step: one piece while others decode, which takes the host some
#: 3 ms, and its reading a core some 5 ms; else all that staging holds.
IMPORT_BYTES_BESIDE = PIECE_BYTES
#: Pieces read ahead meanwhile, so that threads leave the cores to a CPU that decodes.
PIECES_AHEAD_BESIDE = 2
#: Bytes copied out for other engines with a step, at most: one piece while others decode, else all
#: that staging holds.
EXPORT_BYTES_BESIDE = PIECE_BYTES
#: More tokens than a request has: all of them.
_ALL_TOKENS = 1 << 30
#: Seconds that what is still to be written may take when the engine sleeps or ends.
DRAIN_SECONDS = 5.0


def staging_bytes(is_waited_for: bool) -> int:
    """Most memory of blocks on their way.

    Args:
        is_waited_for: whether other engines wait for this one's pages.
    """
    return STAGING_BYTES + (STAGING_BYTES_WAITED_FOR if is_waited_for else STAGING_BYTES)


class TransferHooks(StepHooks):
    """Carries out a step's store and load jobs; both end in some later step.

    Stores: a job's blocks are complete after the step that brings it. The step after copies them
    out, and once that is known to have been computed a thread writes the copies. Loads: threads
    read pages into staging memory, and they are put into the pool before a step. A job that cannot
    be done ends as well: what is not stored is computed again some day, and a load that failed is
    computed by its request.
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
            store: the pages outside the pool.
            fingerprint: what they are kept under from now on; asked for each pool, since other
                weights may have been loaded.
            block_size: tokens of a block.
            is_waited_for: whether other engines wait for this one's pages.
        """
        self._fingerprint = fingerprint
        self.store = store
        self.store_jobs = StoreJobs(
            store,
            block_size,
            STAGING_BYTES_WAITED_FOR if is_waited_for else STAGING_BYTES,
            lot_steps=1 if is_waited_for else LOT_STEPS,
        )
        self.load_jobs = LoadJobs(store, STAGING_BYTES)
        self._runner: HookedRunner | None = None
        self._metadata = TransferMetadata({}, {})
        self._expected: dict[int, list[bytes]] = {}  # pages of store jobs that have not ended
        self._untold_content: PoolContent | None = None  # which the scheduler has not heard of
        self._decoding = False  # whether the step at hand computes anything
        self._on_pool: set[str] = set()  # requests that began or started again on this pool
        self._ended: set[str] = set()  # requests that had ended before the step at hand
        #: Jobs of pages that others want, which the scheduler does not know: keys by number.
        self._exports: dict[int, Collection[bytes]] = {}
        self._num_exports = 0

    def pool_made(self, runner: HookedRunner) -> None:
        pages = runner.layers.block_pages()
        content = PoolContent(self._fingerprint(), pages.sizes)
        is_first = self.store.content is None
        if self.store.use(content) and not is_first:  # the handshake tells of the first one
            self._untold_content = content
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
            logger.exception("Blocks could not be copied out of the KV pool before it goes")
        self.store_jobs.lose_pool()
        self.load_jobs.lose_pool()
        if (shared := self.store.shared_pool) is not None:
            shared.pool_goes()
        self._on_pool.clear()
        self._runner = None

    def before_step(self, scheduler_output: SchedulerOutput, sound: bool) -> None:
        metadata = scheduler_output.kv_connector_metadata
        assert isinstance(metadata, TransferMetadata)
        self._metadata = metadata
        self._decoding = bool(scheduler_output.num_scheduled_tokens)
        self._tell_store(metadata)
        self._ended = finished = scheduler_output.finished_req_ids
        self.load_jobs.cancel(metadata.cancelled_loads | finished)
        for job_id, job in metadata.load_jobs.items():
            self.load_jobs.add(job_id, job.req_id, *_pages(job, job.src_spec, job.dst_spec))
        self._read_on()
        if not sound:
            return
        self._on_pool.update(new.req_id for new in scheduler_output.scheduled_new_reqs)
        self._on_pool |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self.store_jobs.drop_urgent()
        self._flush(metadata)
        if (shared := self.store.shared_pool) is not None:
            shared.step_begins(metadata.cached)
            self._export(shared)

    def _tell_store(self, metadata: TransferMetadata) -> None:
        """Drops what requests without sound blocks would have kept; says what is used, and comes.

        Others that had the same blocks lose them, too: the step at hand may clear them.
        """
        self.store_jobs.drop_requests(metadata.void_requests)
        for discard in metadata.discards:
            self.store_jobs.drop_keys(discard.keys)
            self.store.discard(discard)
        for use in metadata.uses:
            self.store.touch(use)
        if metadata.asks_content:
            self._untold_content = self.store.content
        for job_id, job in metadata.store_jobs.items():
            assert isinstance(job.dst_spec, PageKeys)
            self._expected[job_id] = job.dst_spec.keys
            self.store.expect(job.dst_spec.keys)

    def _flush(self, metadata: TransferMetadata) -> None:
        """Copies blocks out at once that this step gives to other requests."""
        flushed = metadata.jobs_to_flush or set()
        for job_id in flushed & metadata.store_jobs.keys():
            self._add_store(job_id, metadata.store_jobs.pop(job_id))
        if flushed:
            assert self._runner is not None
            ends = self.store_jobs.all_due_ends(flushed)
            self._runner.complete_draft_kv(self._draft_ends(ends))
            self.store_jobs.copy_now(flushed)

    def _export(self, shared: SharedPool) -> None:
        """Has pages copied out that other engines want."""
        most_bytes = EXPORT_BYTES_BESIDE if self._decoding else STAGING_BYTES
        room = self.store_jobs.room(most_bytes)
        if wanted := shared.take(self.store_jobs.page_bytes, room):
            self._num_exports += 1
            number = -self._num_exports  # the scheduler's jobs count up from 0
            self._exports[number] = wanted.keys()
            self.store_jobs.add_urgent(number, wanted)

    def _draft_ends(self, ends: dict[str, int]) -> dict[str, int]:
        """Up to where drafts' K/V must be there before blocks are copied, by request id.

        Args:
            ends: for stores. Whose block a page is that others want, nobody knows: all requests
                that the pool has blocks of may be.
        """
        return ends | dict.fromkeys(self._on_pool, _ALL_TOKENS) if self._exports else ends

    def _add_store(self, job_id: int, job: TransferJob) -> None:
        # A request that ended before there was this pool left nothing in its blocks.
        if job.req_id in self._metadata.void_requests or job.req_id not in self._on_pool:
            self.store_jobs.refuse(job_id, job.req_id)
            return
        keys, blocks = _pages(job, job.dst_spec, job.src_spec)
        self.store_jobs.add(job_id, job.req_id, keys, blocks)

    def before_forward(self) -> None:
        self.load_jobs.import_ready(IMPORT_BYTES_BESIDE if self._decoding else STAGING_BYTES)
        self._read_on()

    def _read_on(self) -> None:
        self.load_jobs.read_on(PIECES_AHEAD_BESIDE if self._decoding else None)

    def before_submit(self) -> None:
        assert self._runner is not None
        self._runner.complete_draft_kv(self._draft_ends(self.store_jobs.due_ends()))
        self._runner.join_step(self.store_jobs.queue_batch())

    def after_step(self, computed: bool) -> KVConnectorOutput | None:
        metadata = self._metadata
        if computed and self._decoding:
            self.store_jobs.handed_over()
        for job_id, job in metadata.store_jobs.items():
            if computed:
                self._add_store(job_id, job)
            else:
                self.store_jobs.refuse(job_id, job.req_id)
        self._metadata = TransferMetadata({}, {})
        self.store_jobs.end_step()
        self._on_pool -= self._ended
        if computed and not self._decoding:
            assert self._runner is not None
            self._runner.complete_draft_kv(self._draft_ends(self.store_jobs.all_due_ends()))
            self.store_jobs.copy_now()  # nothing else keeps the device busy
        outcome = self._outcome()
        if (shared := self.store.shared_pool) is not None and shared.is_waited_for:
            shared.bell.ring()  # for what was wanted in between, or did not fit
        return outcome

    def steps_computed(self, num_left: int) -> None:
        self.store_jobs.steps_computed(num_left)

    def _outcome(self) -> KVConnectorOutput | None:
        """What has ended since the step before."""
        news = TransferUpdate()
        loaded = self.load_jobs.finished()
        for store in self.store_jobs.finished():
            if store.job_id in self._exports:
                assert self.store.shared_pool is not None
                self.store.shared_pool.ended(self._exports.pop(store.job_id))
                continue
            self.store.expect_no_more(self._expected.pop(store.job_id))
            news.mark_completed(store.job_id)
            if store.num_bytes:
                news.transfer_stats.store.record(store.num_bytes, store.seconds)
        for load in loaded:
            news.mark_completed(load.job_id)
            if load.num_bytes:
                news.transfer_stats.load.record(load.num_bytes, load.seconds)
        in_part = {load.req_id for load in loaded if load.missing_blocks}
        news.loaded_in_part = in_part
        self.store.tell(news)
        news.content, self._untold_content = self._untold_content, None
        if news == TransferUpdate():
            return None
        return KVConnectorOutput(
            finished_recving={load.req_id for load in loaded},
            failed_recving={load.req_id for load in loaded if load.failed} - in_part,
            invalid_block_ids={block for load in loaded for block in load.missing_blocks},
            kv_connector_worker_meta=news,
        )

    def figures(self) -> Figures:
        return self.store.figures()

    def close(self) -> None:
        """Ends the threads; there is no pool any more."""
        self.load_jobs.close()
        self.store.close()


def _pages(job: TransferJob, keys: object, blocks: object) -> tuple[PageKeys, Iterable[int]]:
    """A job's pages, and the block of each."""
    assert isinstance(keys, PageKeys) and isinstance(blocks, GPULoadStoreSpec)
    return keys, blocks.block_ids.tolist()
