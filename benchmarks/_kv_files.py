# SPDX-License-Identifier: Apache-2.0
"""Compares read and write rates of the page store with those of plain files.

Both move the same bytes between the same memory and as many files of the same size, with as many
threads, and both leave it to the system when bytes reach the disk. "Flushed" adds an fsync of each
file at the end; "from disk" reads what was taken out of the page cache.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import vllm.config  # noqa: F401  # before vllm.distributed: they import each other

from vllm_metal.engine.kv_cache.pages import PagePart, finite_rows, page_rows
from vllm_metal.kv_transfer.batch_writer import ROWS_BYTES
from vllm_metal.kv_transfer.disk import layout
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.space import WriteResult
from vllm_metal.kv_transfer.disk.store import DiskStore
from vllm_metal.kv_transfer.load_jobs import NUM_READERS, PIECE_BYTES

_FINGERPRINT = "00" * 16
_NAMESPACE = "shared"
#: Memory for pages: the store's own size for each direction.
_STAGED_BYTES = 64 << 20
#: Bytes per call of plain reads and writes of large files.
_CALL_BYTES = 8 << 20


@dataclass(frozen=True)
class PageShape:
    """The `count` equal float32 parts of a page."""

    count: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> list[PagePart]:
        """Parts as a pool has them."""
        nbytes = math.prod(self.shape) * mx.float32.size
        return [PagePart(self.shape, mx.float32, nbytes)] * self.count


#: Pages of 16 tokens: SmolLM2-135M in float32, 30 layers of 3 heads; and a file of a page of an 8B
#: model in 16 bits, 36 layers of 8 heads of 128.
SMOLLM2 = PageShape(60, (16, 3, 64))
LARGE = PageShape(72, (16, 4, 128))


@dataclass(frozen=True)
class Rates:
    """GB/s, medians; ratios are medians of ratios taken in turn."""

    what: str
    page_bytes: int
    store: float
    raw: float  # one file per page
    raw_one_file: float
    ratio: float  # store / raw


class FileBench:
    """Measures the store and plain files alternately in one folder."""

    def __init__(self, folder: Path, page: PageShape, total_bytes: int, repeats: int) -> None:
        """
        Args:
            folder: an empty folder.
            page: the pages to write.
            total_bytes: bytes per turn.
            repeats: number of turns.
        """
        self._page = page
        self._plain = folder / "plain"
        self._plain.mkdir()
        self._repeats = repeats
        self._cache = DiskStore(folder / "cache", Limits(8 * total_bytes, None))
        self._blocks = self._cache.blocks(_FINGERPRINT, {}, _NAMESPACE)
        self._pages_folder = folder / "cache" / _FINGERPRINT / _NAMESPACE
        self._keys = [os.urandom(36) for _ in range(max(1, total_bytes // page.nbytes))]
        self._per_piece = max(1, PIECE_BYTES // page.nbytes)
        num_pieces = max(NUM_READERS, _STAGED_BYTES // (self._per_piece * page.nbytes))
        self._copies = [
            [mx.random.normal((self._per_piece, *page.shape)) for _ in range(page.count)]
            for _ in range(num_pieces)
        ]
        mx.eval(self._copies)
        at_once = max(1, ROWS_BYTES // page.nbytes)
        self._memory = np.zeros((at_once, page.nbytes), np.uint8)
        self._rows = np.zeros((num_pieces, self._per_piece, page.nbytes), np.uint8)
        self._ring = memoryview(bytearray(os.urandom(1 << 20) * (_STAGED_BYTES >> 20)))

    def run(self) -> list[Rates]:
        """Runs all measurements."""
        took: dict[str, list[tuple[float, float, float]]] = {}

        def note(what: str, *ways: Callable[[], float]) -> None:
            store, raw, one = [way() for way in ways]
            took.setdefault(what, []).append((store, raw, one))

        can_drop = hasattr(os, "posix_fadvise")
        for _ in range(self._repeats):
            self._clear()
            note("written", self._store, self._raw_write, self._raw_write_one)
            self._clear()
            note(
                "written and flushed",
                lambda: self._store() + self._flush(self._paths()),
                lambda: self._raw_write() + self._flush(self._plain_paths()),
                lambda: self._raw_write_one() + self._flush([self._one]),
            )
            if can_drop:
                self._drop()
                note("read from disk", self._load, self._raw_read, self._raw_read_one)
            note("read from page cache", self._load, self._raw_read, self._raw_read_one)
        num_bytes = len(self._keys) * self._page.nbytes
        self._clear()
        self._cache.close()
        return [
            Rates(
                what,
                self._page.nbytes,
                num_bytes / statistics.median(store for store, _, _ in times) / 1e9,
                num_bytes / statistics.median(raw for _, raw, _ in times) / 1e9,
                num_bytes / statistics.median(one for _, _, one in times) / 1e9,
                statistics.median(raw / store for store, raw, _ in times),
            )
            for what, times in took.items()
        ]

    @property
    def _one(self) -> Path:
        return self._plain / "one"

    def _paths(self) -> list[Path]:
        return [layout.block_path(self._pages_folder, key) for key in self._keys]

    def _plain_paths(self) -> list[Path]:
        return [self._plain / f"{number:05d}" for number in range(len(self._keys))]

    def _clear(self) -> None:
        self._blocks.discard(self._keys)
        for path in self._plain.iterdir():
            path.unlink()

    def _slice(self, number: int, size: int) -> memoryview:
        start = number * size % (_STAGED_BYTES - size)
        return self._ring[start : start + size]

    def _store(self) -> float:
        """Writes batches as the store's thread does, including checksums."""
        started = time.perf_counter()
        for first in range(0, len(self._keys), self._per_piece):
            last = min(first + self._per_piece, len(self._keys))
            batch = self._copies[first // self._per_piece % len(self._copies)]
            for number, row in enumerate(self._made_rows(batch, last - first), first):
                written = self._blocks.write(self._keys[number], row, 1e9, number)
                assert written is WriteResult.STORED, written
        return time.perf_counter() - started

    def _made_rows(self, batch: Sequence[mx.array], count: int) -> Iterator[memoryview]:
        parts = self._page.parts
        for first in range(0, count, len(self._memory)):
            rows = page_rows(batch, first, min(first + len(self._memory), count), self._memory)
            assert finite_rows(parts, rows).all()
            yield from map(memoryview, rows)

    def _raw_write(self) -> float:
        started = time.perf_counter()
        for number, path in enumerate(self._plain_paths()):
            _write(path, [self._slice(number, self._page.nbytes)])
        return time.perf_counter() - started

    def _raw_write_one(self) -> float:
        started = time.perf_counter()
        _write(self._one, self._calls())
        return time.perf_counter() - started

    def _calls(self) -> Iterable[memoryview]:
        left, number = len(self._keys) * self._page.nbytes, 0
        while left:
            size = min(left, _CALL_BYTES)
            yield self._slice(number, size)
            left, number = left - size, number + 1

    def _load(self) -> float:
        """Reads as the store's readers do: each thread reads parts of several pages."""

        def read(first: int) -> bool:
            keys = self._keys[first : first + self._per_piece]
            rows = self._rows[first // self._per_piece % len(self._rows)]
            pages = zip(keys, rows, strict=False)
            return all(self._blocks.read(key, memoryview(row)) for key, row in pages)

        return _in_threads(read, range(0, len(self._keys), self._per_piece))

    def _raw_read(self) -> float:
        paths, per_piece = self._plain_paths(), self._per_piece

        def read(first: int) -> bool:
            size = self._page.nbytes
            numbers = range(first, min(first + per_piece, len(paths)))
            return all(_read(paths[n], 0, self._slice(n, size)) == size for n in numbers)

        return _in_threads(read, range(0, len(paths), per_piece))

    def _raw_read_one(self) -> float:
        def read(number: int) -> bool:
            view = self._slice(number, _CALL_BYTES)
            return _read(self._one, number * _CALL_BYTES, view) > 0

        size = len(self._keys) * self._page.nbytes
        return _in_threads(read, range(-(-size // _CALL_BYTES)))

    def _flush(self, paths: Iterable[Path]) -> float:
        started = time.perf_counter()
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        return time.perf_counter() - started

    def _drop(self) -> None:
        """Drops all (flushed) files from the page cache."""
        for path in [*self._paths(), *self._plain_paths(), self._one]:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _in_threads(read: Callable[[int], bool], numbers: Sequence[int]) -> float:
    with ThreadPoolExecutor(NUM_READERS) as readers:
        started = time.perf_counter()
        good = list(readers.map(read, numbers))
        seconds = time.perf_counter() - started
    assert all(good)
    return seconds


def _write(path: Path, calls: Iterable[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for view in calls:
        while view:
            view = view[os.write(descriptor, view) :]
    os.close(descriptor)


def _read(path: Path, offset: int, view: memoryview) -> int:
    """Reads into the view until it is full or the file ends; returns the bytes read."""
    descriptor = os.open(path, os.O_RDONLY)
    done = 0
    while done < len(view) and (got := os.preadv(descriptor, [view[done:]], offset + done)):
        done += got
    os.close(descriptor)
    return done
