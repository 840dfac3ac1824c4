# SPDX-License-Identifier: Apache-2.0
"""Store jobs: blocks on their way out of the pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from vllm_metal.device import errors
from vllm_metal.engine.kv_cache.pages import BlockPages
from vllm_metal.kv_transfer.batch_writer import BatchWriter, PageBatch, PoolPage, StoreJob
from vllm_metal.kv_transfer.messages import JobResult, PageKeys

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.page_store import PageStore

#: Pages are copied out of the pool in batches of this many bytes, or when the oldest has waited for
#: this many steps: a copy costs the host some 5 µs per array, whatever its size.
BATCH_BYTES, BATCH_STEPS = 8 << 20, 16
#: Copies blocks of a group out of the pool.
Export = Callable[[int, np.ndarray], list[mx.array]]


def _ends(pages: Iterable[PoolPage]) -> dict[str, int]:
    """Returns how many tokens of each request the pages complete, by request id."""
    ends: dict[str, int] = {}
    for page in pages:
        ends[page.job.req_id] = max(ends.get(page.job.req_id, 0), page.end)
    return ends


class StoreJobs:
    """Copies blocks of ended steps out of the pool, and writes them in a thread.

    Copies take at most `staging_bytes` until they are written, and writing takes ROWS_BYTES, or a
    page, more. A block that is reassigned before there is room for its copy is dropped. No step
    ever waits for a store.
    """

    # A page is due once the step that completes it is submitted, and the next step copies it.
    # Copies are written once that step was computed, as nothing that a failed step left may be
    # found later.

    def __init__(
        self,
        store: PageStore,
        block_size: int,
        staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        batch_steps: int = BATCH_STEPS,
    ) -> None:
        """
        Args:
            block_size: tokens of a block.
            staging_bytes: memory limit of copies; a single page may be larger.
            clock: returns seconds.
            batch_steps: limit of steps that a page waits to be copied together with later pages.
        """
        self._store = store
        self._staging_bytes = staging_bytes
        self._clock = clock
        self._batch_steps = batch_steps
        self._due: deque[PoolPage] = deque()
        self._queued: list[PageBatch] = []  # copies that are not yet submitted to the device
        self._submitted: deque[list[PageBatch]] = deque()  # by step that may fail, oldest first
        self._due_bytes = self._staged_bytes = 0
        self._step = 0
        self._ended: list[JobResult] = []
        self._writer = BatchWriter(store, block_size)

    def use(self, pages: BlockPages) -> None:
        """Makes later jobs copy pages out of this pool."""
        self._pages = pages

    def room(self, most_bytes: int) -> int:
        """Returns how many bytes of pages can be copied now, up to `most_bytes`.

        It is at least the size of a page if nothing is staged.
        """
        self._collect_written()
        largest = max(self._pages.sizes)
        staging = max(self._staging_bytes, 0 if self._staged_bytes else largest)
        return min(max(most_bytes, largest), staging - self._staged_bytes)

    def page_bytes(self, key: bytes) -> int:
        return self._pages.page_bytes(get_offload_group_idx(OffloadKey(key)))

    @property
    def busy(self) -> bool:
        """Whether a page waits to be copied or written."""
        return bool(self._due or self._queued or self._staged_bytes)

    @property
    def staged_bytes(self) -> int:
        """Memory of copies that are not written yet."""
        return self._staged_bytes

    def add(self, job_id: int, req_id: str, keys: PageKeys, blocks: Iterable[int]) -> None:
        """Adds a job; its blocks, in the order of the keys, are complete after this step."""
        namespace = self._store.namespace(keys.namespace)
        found = zip(keys.keys, keys.ends, blocks, strict=True)
        pages = [
            (key, end, block) for key, end, block in found if self._store.wants(namespace, key)
        ]
        if not pages:
            self.refuse(job_id, req_id)
            return
        job = StoreJob(job_id, req_id, namespace, keys.used_at, len(pages), self._clock())
        for key, end, block in pages:
            group = get_offload_group_idx(OffloadKey(key))
            size = self._pages.page_bytes(group)
            self._due.append(PoolPage(job, group, block, key, end, self._step, size))
            self._due_bytes += size

    def add_urgent(self, job_id: int, blocks: Mapping[bytes, int]) -> None:
        """Adds a job of complete blocks that peers want, copied first, with the current step.

        Later steps may write to these blocks, so `drop_urgent` drops pages not copied by then.

        Args:
            job_id: unique among all jobs.
            blocks: pool block by key; at least one, at most what there is `room` for.
        """
        started, step = self._clock(), self._step - self._batch_steps  # waits for no other pages
        job = StoreJob(
            job_id,
            "",
            self._store.namespace(None),
            time.time(),
            len(blocks),
            started,
            is_urgent=True,
        )
        for key, block in reversed([*blocks.items()]):
            group, size = get_offload_group_idx(OffloadKey(key)), self.page_bytes(key)
            self._due.appendleft(PoolPage(job, group, block, key, 0, step, size))
            self._due_bytes += size

    def refuse(self, job_id: int, req_id: str) -> None:
        """Ends a job without storing anything."""
        self._ended.append(JobResult(job_id, req_id))

    def end_step(self) -> None:
        """Makes the pages of jobs added in this step due for copying."""
        self._step += 1

    def due_ends(self) -> dict[str, int]:
        """Returns, by request id, the number of tokens up to the end of the next batch's pages.

        Also frees the memory of written copies; call it before `queue_batch`.
        """
        self._collect_written()
        return _ends(islice(self._due, self._num_fitting() if self._is_batch_due() else 0))

    def all_due_ends(self, job_ids: Collection[int] | None = None) -> dict[str, int]:
        """Like `due_ends` for all due pages, or those of `job_ids`; call it before `copy_now`."""
        due = self._due
        return _ends(page for page in due if job_ids is None or page.job.job_id in job_ids)

    def queue_batch(self) -> list[mx.array]:
        """Returns copies of due pages, to be submitted with the step that is being built."""
        if not self._is_batch_due():
            return []
        self._queued += self._copy(None, self._pages.queue_export)
        return [array for batch in self._queued for array in batch.arrays]

    def step_submitted(self) -> None:
        """Notes that the step with the copies of `queue_batch` was submitted to the device."""
        self._submitted.append(self._queued)
        self._queued = []

    def steps_computed(self, num_left: int) -> None:
        """Writes the copies of all submitted steps except the last `num_left`."""
        while len(self._submitted) > num_left:
            for batch in self._submitted.popleft():
                self._writer.submit(batch)

    def copy_now(self, job_ids: Collection[int] | None = None) -> None:
        """Copies due pages of some jobs, or of all, between steps; waits for the device.

        Pages of `job_ids` without room are dropped, as their blocks are about to change.
        """
        self._collect_written()
        batches = self._copy(job_ids, self._export)
        if batches:
            self.steps_computed(0)  # `_export` has waited for all submitted steps
        for batch in batches:
            self._writer.submit(batch)
        if job_ids is not None:
            dropped = self.drop(lambda page: page.job.job_id in job_ids)
            self._store.count_dropped(dropped)

    def _export(self, group: int, blocks_np: np.ndarray) -> list[mx.array]:
        copies = self._pages.export(group, blocks_np)
        errors.wait()  # the sources of these copies may not have been computed yet
        return copies

    def _is_batch_due(self) -> bool:
        if not self._due:
            return False
        return self._due_bytes >= BATCH_BYTES or self._step - self._due[0].step >= self._batch_steps

    def _copy(self, job_ids: Collection[int] | None, export: Export) -> list[PageBatch]:
        """Copies due pages as far as there is room; if that fails, their jobs end and it raises."""
        taken = self._take_fitting(job_ids)
        batches = []
        try:
            for group, pages in taken.items():
                blocks_np = np.array([page.block for page in pages], np.int32)
                num_bytes = sum(page.size for page in pages)
                arrays = export(group, blocks_np)
                batches.append(PageBatch(pages, self._pages.parts(group), arrays, num_bytes))
        except Exception:
            for page in (page for pages in taken.values() for page in pages):
                self._finish_page(page)
            raise
        self._staged_bytes += sum(batch.num_bytes for batch in batches)
        return batches

    def _num_fitting(self) -> int:
        """Counts the due pages that fit, oldest first; at least one if nothing is staged."""
        # Stops at the first that does not fit: a slow store leaves thousands due.
        number, room = 0, self._staging_bytes - self._staged_bytes
        for page in self._due:
            room -= page.size
            if room < 0 and (number or self._staged_bytes):
                break
            number += 1
        return number

    def _take_fitting(self, job_ids: Collection[int] | None) -> dict[int, list[PoolPage]]:
        if job_ids is not None:  # these go first
            wanted = [page for page in self._due if page.job.job_id in job_ids]
            others = [page for page in self._due if page.job.job_id not in job_ids]
            self._due = deque(wanted + others)
            number = min(self._num_fitting(), len(wanted))
        else:
            number = self._num_fitting()
        taken: dict[int, list[PoolPage]] = {}
        for page in [self._due.popleft() for _ in range(number)]:
            taken.setdefault(page.group, []).append(page)
            self._due_bytes -= page.size
        return taken

    def _collect_written(self) -> None:
        for batch, sizes in self._writer.written():
            self._staged_bytes -= batch.num_bytes
            for page, size in zip(batch.pages, sizes, strict=True):
                page.job.num_bytes += size
                self._finish_page(page)

    def _finish_page(self, page: PoolPage) -> None:
        job = page.job
        job.pages_left -= 1
        if job.pages_left == 0:
            seconds = self._clock() - job.started
            self._ended.append(JobResult(job.job_id, job.req_id, job.num_bytes, seconds))

    def drop(self, which: Callable[[PoolPage], bool] = lambda page: True) -> int:
        """Drops due pages for which `which` returns True; returns their number."""
        dropped = [page for page in self._due if which(page)]
        self._due = deque(page for page in self._due if not which(page))
        self._due_bytes -= sum(page.size for page in dropped)
        for page in dropped:
            self._finish_page(page)
        return len(dropped)

    def drop_urgent(self) -> None:
        """Drops pages of `add_urgent` that the last step did not copy."""
        if self._due and self._due[0].job.is_urgent:
            self.drop(lambda page: page.job.is_urgent)

    def drop_requests(self, req_ids: Collection[str]) -> None:
        """Drops pages of some requests, unless they are being written."""
        if req_ids:
            self._give_up(lambda page: page.job.req_id in req_ids)

    def drop_keys(self, keys: Collection[bytes]) -> None:
        """Drops pages with some keys, of all requests, unless they are being written."""
        self._give_up(lambda page: page.key in keys)

    def _give_up(self, which: Callable[[PoolPage], bool]) -> None:
        self.drop(which)
        for batch in (batch for batches in self._submitted for batch in batches):
            batch.unwanted.update(page for page in batch.pages if which(page))

    def drop_pool(self) -> None:
        """Drops all copies that may be invalid, as the pool's contents are lost."""
        self.drop()
        for batch in (batch for batches in (*self._submitted, self._queued) for batch in batches):
            self._staged_bytes -= batch.num_bytes
            for page in batch.pages:
                self._finish_page(page)
        self._queued = []
        self._submitted.clear()
        del self._pages

    def finished(self) -> list[JobResult]:
        """Returns jobs that ended since the last call."""
        self._collect_written()
        ended, self._ended = self._ended, []
        return ended

    def drain(self, seconds: float) -> None:
        """Copies and writes all due pages, for at most `seconds`; waits for the device."""
        errors.wait()
        self.steps_computed(0)
        deadline = self._clock() + seconds
        while self.busy and self._clock() < deadline:
            self.copy_now()
            time.sleep(0.001)
            self._collect_written()
