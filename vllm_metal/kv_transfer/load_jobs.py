# SPDX-License-Identifier: Apache-2.0
"""Load jobs: pages on their way into the pool."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from vllm_metal.engine.kv_cache.pages import BlockPages
from vllm_metal.kv_transfer.messages import JobResult, PageKeys

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.page_store import PageStore
    from vllm_metal.kv_transfer.store import Namespace

logger = init_logger(__name__)

#: Pages are read in pieces of this many bytes, at least one page. A piece enters the pool before a
#: step while other requests decode.
PIECE_BYTES = 8 << 20
#: Reader threads. Two keep a device busy while one of them verifies what it has read.
NUM_READERS = 2


@dataclass(eq=False)
class _Job:
    job_id: int
    req_id: str
    keys: PageKeys
    namespace: Namespace  # from its start, so it never loads pages of later weights
    started: float
    blocks: Sequence[int]  # in the pool, in the order of the keys
    loaded: set[int] = field(default_factory=set)  # filled blocks
    num_bytes: int = 0
    stopped: bool = False  # canceled or failed before its last page was read
    failed: bool = False  # a page could not be read


@dataclass
class _Staging:
    """Rows that pieces are read into, by group; allocated on demand and reused."""

    pages: BlockPages
    max_bytes: int
    free: dict[int, list[np.ndarray]] = field(default_factory=dict)
    num_bytes: int = 0  # bytes of all rows, used or free

    def count(self, group: int) -> int:
        """Returns the number of pages in a piece."""
        return max(1, PIECE_BYTES // self.pages.page_bytes(group))

    def _size(self, group: int) -> int:
        return self.count(group) * self.pages.page_bytes(group)

    def take(self, group: int) -> np.ndarray | None:
        """Returns a buffer for pages that are read together, [count(group), page_bytes] uint8.

        None if all memory is in use.
        """
        if self.free.get(group):
            return self.free[group].pop()
        # Other groups' free rows make way.
        for other, free in self.free.items():
            while free and self.num_bytes + self._size(group) > self.max_bytes:
                free.pop()
                self.num_bytes -= self._size(other)
        if self.num_bytes and self.num_bytes + self._size(group) > self.max_bytes:
            return None
        self.num_bytes += self._size(group)
        return np.empty((self.count(group), self.pages.page_bytes(group)), np.uint8)

    def give_back(self, group: int, rows: np.ndarray) -> None:
        self.free.setdefault(group, []).append(rows)

    def clear(self) -> None:
        for group, free in self.free.items():
            self.num_bytes -= len(free) * self._size(group)
        self.free.clear()


@dataclass(frozen=True)
class _Piece:
    job: _Job
    group: int
    keys: Sequence[bytes]
    blocks: Sequence[int]
    rows: np.ndarray
    staging: _Staging

    def release(self) -> None:
        self.staging.give_back(self.group, self.rows)


class LoadJobs:
    """Reads pages into staging memory in threads, and puts them into the pool between steps."""

    def __init__(
        self,
        store: PageStore,
        staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            staging_bytes: memory limit for pages that are not in the pool yet; at least one piece.
            clock: returns seconds.
        """
        self._store = store
        self._staging_bytes = staging_bytes
        self._clock = clock
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-load")
        self._of_requests: dict[str, _Job] = {}  # by request id; active jobs
        self._waiting: deque[tuple[_Job, int, bytes, int]] = deque()  # group, key, block
        self._read: SimpleQueue[tuple[_Piece, bool]] = SimpleQueue()
        self._ready: deque[_Piece] = deque()
        self._num_reading = 0
        self._ended: list[JobResult] = []

    def use(self, pages: BlockPages) -> None:
        """Makes later jobs load pages into this pool."""
        self._pages = pages
        self._staging = _Staging(pages, self._staging_bytes)

    @property
    def busy(self) -> bool:
        """Whether a job is active."""
        return bool(self._of_requests)

    @property
    def req_ids(self) -> Collection[str]:
        """Requests waiting for pages."""
        return self._of_requests.keys()

    @property
    def is_quiet(self) -> bool:
        """Whether no job is active, no thread reads, and no page waits to enter the pool."""
        return not (self._of_requests or self._num_reading or self._ready)

    @property
    def num_ready(self) -> int:
        """Number of pieces that were read but are not in the pool yet."""
        return len(self._ready)

    @property
    def staged_bytes(self) -> int:
        """Memory of pages that are not in the pool yet."""
        return self._staging.num_bytes

    def drop_pool(self) -> None:
        """Ends all loads, as their blocks are gone, and drops what threads still read."""
        self.cancel()
        self._ready.clear()
        del self._pages, self._staging

    def add(self, job_id: int, req_id: str, keys: PageKeys, blocks: Iterable[int]) -> None:
        """Adds a job; `blocks` of the pool are in the order of the keys."""
        pages = list(zip(keys.keys, blocks, strict=True))
        namespace = self._store.namespace(keys.namespace)
        job = _Job(job_id, req_id, keys, namespace, self._clock(), [block for _, block in pages])
        self._of_requests[req_id] = job
        if not pages:
            self._end(job)
        for key, block in pages:
            self._waiting.append((job, get_offload_group_idx(OffloadKey(key)), key, block))

    def cancel(self, req_ids: Collection[str] | None = None) -> None:
        """Ends loads of some requests, or all, without writing to their blocks again."""
        # They have not failed: the scheduler has taken the blocks away, or is about to.
        jobs = self._of_requests.values()
        for job in [job for job in jobs if req_ids is None or job.req_id in req_ids]:
            self._stop(job, failed=False)

    def _stop(self, job: _Job, failed: bool) -> None:
        if not job.stopped:
            job.stopped, job.failed = True, failed
            self._waiting = deque(page for page in self._waiting if page[0] is not job)
            self._end(job)

    def _end(self, job: _Job) -> None:
        del self._of_requests[job.req_id]
        seconds = self._clock() - job.started
        missing = self._missing(job) if job.failed else frozenset()
        self._ended.append(
            JobResult(job.job_id, job.req_id, job.num_bytes, seconds, job.failed, missing)
        )

    def _missing(self, job: _Job) -> frozenset[int]:
        # With several groups, a group's first blocks are useless without those of the others.
        if len(self._pages.sizes) > 1 or job.blocks[0] not in job.loaded:
            return frozenset()
        return frozenset(job.blocks) - job.loaded

    def start_reads(self, most_pieces: int | None = None) -> None:
        """Starts more reads while staging memory is free; called by the engine's thread.

        `most_pieces`: limit of pieces being read or waiting to enter the pool; None: no limit.
        """
        self._collect_read()
        while self._waiting:
            if most_pieces is not None and self._num_reading + len(self._ready) >= most_pieces:
                return
            job, group, _, _ = self._waiting[0]
            rows = self._staging.take(group)
            if rows is None:
                return
            keys: list[bytes] = []
            blocks: list[int] = []
            while self._waiting and len(keys) < self._staging.count(group):
                other, its_group, key, block = self._waiting[0]
                if other is not job or its_group != group:
                    break
                self._waiting.popleft()
                keys.append(key)
                blocks.append(block)
            self._num_reading += 1
            piece = _Piece(job, group, keys, blocks, rows, self._staging)
            self._readers.submit(self._read_piece, piece)

    def _read_piece(self, piece: _Piece) -> None:
        try:
            rows, job = list(piece.rows[: len(piece.keys)]), piece.job
            hints = job.keys.hints
            good = self._store.read(job.namespace, piece.keys, rows, hints, lambda: not job.stopped)
        except Exception:
            logger.exception("Blocks could not be loaded into the KV pool")
            good = False
        self._read.put((piece, good))

    def _collect_read(self) -> None:
        while not self._read.empty():
            piece, good = self._read.get()
            self._num_reading -= 1
            if not good:
                self._stop(piece.job, failed=True)
            if piece.job.stopped:
                piece.release()
            else:
                self._ready.append(piece)

    def import_ready(self, most_bytes: int) -> None:
        """Puts pages into the pool between steps, until `most_bytes`; waits for the device."""
        self._collect_read()
        num_bytes = 0  # at least one piece is imported, whatever its size
        while self._ready and (not num_bytes or num_bytes < most_bytes):
            piece = self._ready.popleft()
            job = piece.job
            if not job.stopped:
                blocks_np = np.array(piece.blocks, np.int32)
                self._pages.import_pages(piece.group, blocks_np, piece.rows)
                size = len(piece.blocks) * self._pages.page_bytes(piece.group)
                num_bytes += size
                job.num_bytes += size
                job.loaded.update(piece.blocks)
                if len(job.loaded) == len(job.blocks):
                    self._end(job)
            piece.release()
        if not self._of_requests and not self._num_reading:
            self._staging.clear()

    def finished(self) -> list[JobResult]:
        """Returns jobs that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Ends all loads and the threads."""
        self.cancel()
        self._readers.shutdown(wait=True, cancel_futures=True)
