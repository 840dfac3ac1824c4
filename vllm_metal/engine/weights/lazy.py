# SPDX-License-Identifier: Apache-2.0
"""Creates MLX arrays whose content a function writes directly into MLX's memory.

MLX reads safetensors from Python file objects: the header on opening, then one read per array. The
file object here has a header but no data; reading an array calls that array's function.
Format of safetensors: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np
import numpy.typing as npt

#: Writes all elements of an array into a uint8 buffer; called in any thread, once per evaluation.
Fill = Callable[[npt.NDArray[np.uint8]], None]
_DTYPES = {
    "U8": mx.uint8,
    "U32": mx.uint32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
_OUTLINES = ContextVar("outlines", default=False)


@contextmanager
def outlines_only() -> Iterator[None]:
    """Context manager in which arrays have shapes and dtypes, but their content is not read."""
    token = _OUTLINES.set(True)
    try:
        yield
    finally:
        _OUTLINES.reset(token)


def has_outlines_only() -> bool:
    """Whether the caller is within `outlines_only`."""
    return _OUTLINES.get()


def evaluate(arrays: list[mx.array]) -> None:
    """Evaluates arrays so that their inputs are freed; no-op within `outlines_only`."""
    if not _OUTLINES.get():
        mx.eval(arrays)


@dataclass(frozen=True)
class LazyArray:
    """An array to be filled later; `dtype` is safetensors' name: U8, U32, F16, BF16 or F32."""

    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _DTYPES[self.dtype].size


class Reader(Mapping[str, mx.array]):
    """Maps names to arrays, which each lookup creates anew, so that none stays in memory."""

    def __init__(self, lazy: Mapping[str, LazyArray]) -> None:
        self._lazy = lazy

    def __getitem__(self, name: str) -> mx.array:
        return arrays_of({name: self._lazy[name]})[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._lazy)

    def __len__(self) -> int:
        return len(self._lazy)


def arrays_of(lazy: Mapping[str, LazyArray]) -> dict[str, mx.array]:
    """Creates an MLX array for each lazy one, by name."""
    if not lazy:
        return {}
    if _OUTLINES.get():
        return {name: mx.zeros(array.shape, _DTYPES[array.dtype]) for name, array in lazy.items()}
    return cast(dict[str, mx.array], mx.load(cast(BinaryIO, _File(lazy)), format="safetensors"))


class _File:
    """A fake safetensors file with a position per thread, as MLX reads from several."""

    closed = False

    def __init__(self, lazy: Mapping[str, LazyArray]) -> None:
        entries: dict[str, Any] = {}
        fills: list[tuple[int, Fill]] = []
        end = 0
        for name, array in lazy.items():
            offsets = [end, end + array.nbytes]
            entries[name] = {
                "dtype": array.dtype,
                "shape": list(array.shape),
                "data_offsets": offsets,
            }
            fills.append((end, array.fill))
            end += array.nbytes
        text = json.dumps(entries).encode()
        self._header = len(text).to_bytes(8, "little") + text
        self._fills = {len(self._header) + offset: fill for offset, fill in fills}
        self._size = len(self._header) + end
        self._local = threading.local()

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self.tell(), self._size)[whence]
        self._local.position = base + offset
        return self.tell()

    def tell(self) -> int:
        return int(getattr(self._local, "position", 0))

    def readinto(self, buffer: Any) -> int:
        target = np.frombuffer(buffer, np.uint8)
        position = self.tell()
        if position < len(self._header):
            target[:] = np.frombuffer(self._header[position : position + target.size], np.uint8)
        else:
            self._fills[position](target)
        self._local.position = position + target.size
        return int(target.size)

    def read(self, size: int = -1) -> bytes:
        position = self.tell()
        found = self._header[position : position + size]
        self._local.position = position + len(found)
        return found

    def write(self, data: bytes) -> int:
        raise OSError("this file is read only")

    def flush(self) -> None:
        return
