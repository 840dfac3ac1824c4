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
from vllm_metal.kv_transfer.messages import Ended, PageKeys

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.page_store import PageStore

#: Pages are copied out of the pool in lots of so many bytes, or when the oldest has waited for so
#: many steps: a copy costs the host some 5 µs an array, whatever its size.
LOT_BYTES, LOT_STEPS = 8 << 20, 16
#: Copies some blocks of a group out of the pool.
Export = Callable[[int, np.ndarray], list[mx.array]]


def _ends(pages: Iterable[PoolPage]) -> dict[str, int]:
    """By request id how many tokens of it the pages complete."""
    ends: dict[str, int] = {}
    for page in pages:
        ends[page.job.req_id] = max(ends.get(page.job.req_id, 0), page.end)
    return ends


class StoreJobs:
    """Copies blocks of ended steps out of the pool, and has a thread write them.

    A page is due once the step that completes it is with the device: the step after takes it along.
    Copies are written once it is known that this step, and with it all before, was computed: what a
    step leaves that fails must not be found later.
    Copies that are not written yet take `staging_bytes` at most, and the rows that are made of them
    ROWS_BYTES, or a page, more. A block whose memory is wanted for another request before there is
    room for its copy is dropped. No step ever waits for a store.
    """

    def __init__(
        self,
        store: PageStore,
        block_size: int,
        staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        lot_steps: int = LOT_STEPS,
    ) -> None:
        """
        Args:
            store: where they go.
            block_size: tokens of a block.
            staging_bytes: most memory of copies; a single page may be larger.
            lot_steps: steps that a page waits for others at most.
            clock: seconds.
        """
        self._store = store
        self._staging_bytes = staging_bytes
        self._clock = clock
        self._lot_steps = lot_steps
        self._due: deque[PoolPage] = deque()
        self._lots: list[PageBatch] = []  # copies queued, but not handed to the device
        self._unproven: deque[list[PageBatch]] = deque()  # by step that has them, the oldest first
        self._due_bytes = self._staged_bytes = 0
        self._step = 0
        self._ended: list[Ended] = []
        self._writer = BatchWriter(store, block_size)

    def use(self, pages: BlockPages) -> None:
        """There is a pool, and these are its blocks."""
        self._pages = pages

    def room(self, most_bytes: int) -> int:
        """Bytes of pages that there is room to copy now; a page where nothing is staged.

        Args:
            most_bytes: of the answer, or a page's bytes where these are more.
        """
        self._take_written()
        largest = max(self._pages.sizes)
        staging = max(self._staging_bytes, 0 if self._staged_bytes else largest)
        return min(max(most_bytes, largest), staging - self._staged_bytes)

    def page_bytes(self, key: bytes) -> int:
        """Bytes of a page."""
        return self._pages.page_bytes(get_offload_group_idx(OffloadKey(key)))

    @property
    def busy(self) -> bool:
        """Whether a job has not ended."""
        return bool(self._due or self._lots or self._staged_bytes)

    @property
    def staged_bytes(self) -> int:
        """Memory of copies that are not written yet."""
        return self._staged_bytes

    def add(self, job_id: int, req_id: str, keys: PageKeys, blocks: Iterable[int]) -> None:
        """Takes a job; its blocks are complete once the step at hand is.

        Args:
            job_id: the scheduler's.
            req_id: whose blocks they are.
            keys: where they go.
            blocks: of the pool, in the order of the keys.
        """
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
        """Takes a job of complete blocks that others want: it goes first, with the step at hand.

        `drop_urgent` drops what is not copied with it: later steps may write to these blocks.

        Args:
            job_id: no other job's.
            blocks: of the pool, by key; one at least, and no more than there is `room` for.
        """
        started, step = self._clock(), self._step - self._lot_steps  # so it waits for no others
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
        """Ends a job of which nothing is kept."""
        self._ended.append(Ended(job_id, req_id))

    def end_step(self) -> None:
        """Jobs that were added are due from now on."""
        self._step += 1

    def due_ends(self) -> dict[str, int]:
        """By request id how many tokens of it the pages of the next batch complete.

        Makes room for that batch as well, where others are written: call it before `queue_batch`.
        """
        self._take_written()
        return _ends(islice(self._due, self._num_fitting() if self._worthwhile() else 0))

    def all_due_ends(self, job_ids: Collection[int] | None = None) -> dict[str, int]:
        """What `due_ends` says of all due pages, or some jobs': call it before `copy_now`."""
        due = self._due
        return _ends(page for page in due if job_ids is None or page.job.job_id in job_ids)

    def queue_batch(self) -> list[mx.array]:
        """Copies of due pages, to be handed to the device with the step that is being built."""
        if not self._worthwhile():
            return []
        self._lots += self._copied(None, self._pages.queue_export)
        return [array for batch in self._lots for array in batch.arrays]

    def handed_over(self) -> None:
        """The device has a step, with the copies that `queue_batch` gave."""
        self._unproven.append(self._lots)
        self._lots = []

    def steps_computed(self, num_left: int) -> None:
        """All steps handed over, but for the last so many, were computed: copies can be written."""
        while len(self._unproven) > num_left:
            for batch in self._unproven.popleft():
                self._writer.submit(batch)

    def copy_now(self, job_ids: Collection[int] | None = None) -> None:
        """Copies due pages of some jobs, or of all; waits for the device, between steps.

        Pages of `job_ids` that have no room are dropped, for their blocks are about to change.
        """
        self._take_written()
        batches = self._copied(job_ids, self._export)
        if batches:
            self.steps_computed(0)  # they have ended as well
        for batch in batches:
            self._writer.submit(batch)
        if job_ids is not None:
            dropped = self.drop(lambda page: page.job.job_id in job_ids)
            self._store.count_dropped(dropped)

    def _export(self, group: int, blocks_np: np.ndarray) -> list[mx.array]:
        copies = self._pages.export(group, blocks_np)
        errors.wait()  # else what these are copies of need not have been computed
        return copies

    def _worthwhile(self) -> bool:
        if not self._due:
            return False
        return self._due_bytes >= LOT_BYTES or self._step - self._due[0].step >= self._lot_steps

    def _copied(self, job_ids: Collection[int] | None, export: Export) -> list[PageBatch]:
        """Copies due pages for which there is room; where that fails, their jobs end all the same.

        Raises:
            what `export` raises: a step on the device failed, or memory ran out.
        """
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
                self._count_off(page)
            raise
        self._staged_bytes += sum(batch.num_bytes for batch in batches)
        return batches

    def _num_fitting(self) -> int:
        """How many due pages there is room for, oldest first; one where nothing is staged.

        A store that is slow leaves thousands due, so no step looks at more than it takes.
        """
        number, room = 0, self._staging_bytes - self._staged_bytes
        for page in self._due:
            room -= page.size
            if room < 0 and (number or self._staged_bytes):
                break
            number += 1
        return number

    def _take_fitting(self, job_ids: Collection[int] | None) -> dict[int, list[PoolPage]]:
        """Takes due pages for which there is room, oldest first; by group."""
        if job_ids is not None:  # those first
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

    def _take_written(self) -> None:
        for batch, sizes in self._writer.written():
            self._staged_bytes -= batch.num_bytes
            for page, size in zip(batch.pages, sizes, strict=True):
                page.job.num_bytes += size
                self._count_off(page)

    def _count_off(self, page: PoolPage) -> None:
        job = page.job
        job.pages_left -= 1
        if job.pages_left == 0:
            seconds = self._clock() - job.started
            self._ended.append(Ended(job.job_id, job.req_id, job.num_bytes, seconds))

    def drop(self, which: Callable[[PoolPage], bool] = lambda page: True) -> int:
        """Gives up due pages; how many."""
        dropped = [page for page in self._due if which(page)]
        self._due = deque(page for page in self._due if not which(page))
        self._due_bytes -= sum(page.size for page in dropped)
        for page in dropped:
            self._count_off(page)
        return len(dropped)

    def drop_urgent(self) -> None:
        """Gives up pages of `add_urgent` that no step took along, before the next one begins."""
        if self._due and self._due[0].job.is_urgent:
            self.drop(lambda page: page.job.is_urgent)

    def drop_requests(self, req_ids: Collection[str]) -> None:
        """Gives up pages of some requests that no thread is writing."""
        if req_ids:
            self._give_up(lambda page: page.job.req_id in req_ids)

    def drop_keys(self, keys: Collection[bytes]) -> None:
        """Gives up pages of some keys likewise, whosever they are."""
        self._give_up(lambda page: page.key in keys)

    def _give_up(self, which: Callable[[PoolPage], bool]) -> None:
        self.drop(which)
        for batch in (batch for batches in self._unproven for batch in batches):
            batch.unwanted.update(page for page in batch.pages if which(page))

    def lose_pool(self) -> None:
        """Gives up all copies that are not known to be right: what the pool held is lost."""
        self.drop()
        for batch in (batch for batches in (*self._unproven, self._lots) for batch in batches):
            self._staged_bytes -= batch.num_bytes
            for page in batch.pages:
                self._count_off(page)
        self._lots = []
        self._unproven.clear()
        del self._pages

    def finished(self) -> list[Ended]:
        """Jobs that have ended since the last call."""
        self._take_written()
        ended, self._ended = self._ended, []
        return ended

    def drain(self, seconds: float) -> None:
        """Copies and writes all that is due, for so long at most; waits for the device."""
        errors.wait()
        self.steps_computed(0)
        deadline = self._clock() + seconds
        while self.busy and self._clock() < deadline:
            self.copy_now()
            time.sleep(0.001)
            self._take_written()
