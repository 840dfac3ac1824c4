# SPDX-License-Identifier: Apache-2.0
"""BatchWriter writes copies of K/V blocks to the stores, in the stores' writer thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from vllm.logger import init_logger

from vllm_metal.engine.kv_cache.pages import PagePart, finite_rows, page_rows

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.page_store import PageStore
    from vllm_metal.kv_transfer.store import Namespace

logger = init_logger(__name__)

#: Bytes of copies that are converted to rows at a time, at least one page.
ROWS_BYTES = 4 << 20


@dataclass(eq=False)
class StoreJob:
    """Pages of one request to store."""

    job_id: int
    req_id: str
    namespace: Namespace  # from its start, so pages never go to a namespace of later weights
    used_at: float
    pages_left: int
    started: float
    num_bytes: int = 0  # stored
    is_urgent: bool = False  # goes before all other jobs


@dataclass(frozen=True)
class PoolPage:
    """A page in a block of the pool."""

    job: StoreJob
    group: int
    block: int
    key: bytes
    end: int  # number of the text's tokens up to its end
    step: int  # number of the step that completed it
    size: int  # bytes


@dataclass(frozen=True)
class PageBatch:
    """Pages of one group that are copied together."""

    pages: Sequence[PoolPage]
    parts: Sequence[PagePart]
    arrays: list[mx.array]
    num_bytes: int
    unwanted: set[PoolPage] = field(default_factory=set)  # dropped before they were written


class BatchWriter:
    """Writes batches of pages to the stores. The engine's thread calls its methods."""

    # The stores' thread gets memory instead of MLX arrays, so that MLX never raises a device error
    # in that thread.

    def __init__(self, store: PageStore, block_size: int) -> None:
        self._store = store
        self._block_size = block_size
        self._written: SimpleQueue[tuple[PageBatch, list[int]]] = SimpleQueue()
        self._memory = np.empty(0, np.uint8)  # rows; allocated by the stores' thread

    def submit(self, batch: PageBatch) -> None:
        """Queues a batch for writing, and empties `batch.arrays`, which must have been computed."""
        memory = [memoryview(array) for array in batch.arrays]  # type: ignore[arg-type]
        batch.arrays.clear()
        self._store.writer.submit(self._write, batch, memory)

    def written(self) -> Iterator[tuple[PageBatch, list[int]]]:
        """Yields batches written since the last call, with the bytes stored per page."""
        while not self._written.empty():
            yield self._written.get()

    def _write(self, batch: PageBatch, copies: list[memoryview]) -> None:
        sizes = [0] * len(batch.pages)
        try:
            count = max(1, ROWS_BYTES // batch.pages[0].size)
            if self._memory.nbytes < count * batch.pages[0].size:
                self._memory = np.empty(count * batch.pages[0].size, np.uint8)
            for first in range(0, len(sizes), count):
                sizes[first : first + count] = self._write_pages(
                    batch, copies, first, first + count
                )
        except Exception:
            logger.exception("Blocks copied out of the KV pool could not be stored")
        copies.clear()  # before the room they took is reused
        self._written.put((batch, sizes))

    def _write_pages(
        self, batch: PageBatch, copies: list[memoryview], start: int, stop: int
    ) -> list[int]:
        """Stores some pages of a batch; returns the bytes stored per page."""
        pages, sizes = batch.pages[start:stop], []
        memory = self._memory[: len(pages) * pages[0].size].reshape(len(pages), -1)
        rows = page_rows(copies, start, stop, memory)
        for page, row, finite in zip(pages, rows, finite_rows(batch.parts, rows), strict=True):
            sizes.append(0)
            if page in batch.unwanted:
                continue
            if not finite:
                logger.warning_once("A block with NaN or infinity is not stored")
                continue
            if self._keep(page, row):
                sizes[-1] = page.size
        return sizes

    def _keep(self, page: PoolPage, row: np.ndarray) -> bool:
        job = page.job
        if job.is_urgent:
            return self._store.write_shared(job.namespace, page.key, row, job.used_at)
        depth = page.end // self._block_size
        return self._store.write(job.namespace, page.key, row, job.used_at, depth)
