# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files: metadata by key, tensors memory-mapped.

The header is parsed here because `gguf.GGUFReader` makes a numpy view of every string of the
vocabulary: 14 s for Gemma 3's 262,144 tokens on one core, against 0.2 s here. Types, block sizes
and decoding come from `gguf`. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

_VERSIONS = (2, 3)  # 3 added big-endian files, which are not supported
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


class ConversionError(ValueError):
    """A GGUF file cannot be converted or served; the message says why, and what to do."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor that is read from disk when used."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Logical shape, rows first."""
    data: npt.NDArray[np.uint8]
    """(rows, bytes of a row), a view of the memory map."""

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, [rows of all matrices, bytes per row]; a vector has one row."""
        return self.data.reshape(prod(self.shape[:-1]), -1)


class GGUFSource:
    """A GGUF model of one or several files; `tensors` maps GGUF names to tensors."""

    def __init__(self, path: Path) -> None:
        """Opens `path` and, if it is a part of a split model, all parts.

        Raises ConversionError: a file is missing or damaged.
        """
        self.path = path
        header = _open(path)
        self._metadata, self.tensors = header.metadata, header.tensors
        self.files: tuple[Path, ...] = (path,)
        if (count := int(self.get("split.count", 1) or 1)) > 1:
            self._join(count)
        self.architecture = str(self.require("general.architecture"))

    def _join(self, count: int) -> None:
        """Opens all parts and merges their tensors; the first part has the metadata."""
        name = _PART.fullmatch(self.path.name)
        if name is None or int(name["count"]) != count:
            raise ConversionError(
                f"{self.path} is one of {count} parts, but its name does not end in "
                f"-00001-of-{count:05}.gguf, by which the others are found. Rename the parts"
            )
        self.files = tuple(
            self.path.with_name(f"{name['stem']}-{number:05}-of-{count:05}.gguf")
            for number in range(1, count + 1)
        )
        parts = [_open(file) for file in self.files]
        self._metadata, self.tensors = parts[0].metadata, {}
        for file, part in zip(self.files, parts, strict=True):
            for tensor in part.tensors:
                if tensor in self.tensors:
                    raise ConversionError(
                        f"{file}: tensor {tensor} is in two parts: download them again"
                    )
            self.tensors |= part.tensors
        expected = int(self.get("split.tensors.count", len(self.tensors)))
        if expected != len(self.tensors):
            raise ConversionError(
                f"{self.path}: the parts have {len(self.tensors)} tensors of {expected}; download "
                "them again"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a metadata value as plain Python (int, float, bool, str, list), or `default`."""
        return self._metadata.get(key, default)

    def require(self, key: str) -> Any:
        """Returns a metadata value; raises ConversionError if the file lacks the key."""
        if key not in self._metadata:
            raise ConversionError(
                f"{self.path}: the metadata has no {key}: choose another file of the model"
            )
        return self._metadata[key]

    def arch(self, key: str, default: Any = None) -> Any:
        """Like `get`, for a hyper-parameter: prefixes the key with the architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    def require_arch(self, key: str) -> Any:
        """Like `require`, for a hyper-parameter: prefixes the key with the architecture."""
        return self.require(f"{self.architecture}.{key}")


def is_gguf(path: Path) -> bool:
    """Whether a file's first bytes are GGUF's; its name does not matter."""
    try:
        with path.open("rb") as file:
            return file.read(4) == GGUF_MAGIC.to_bytes(4, "little")
    except OSError:
        return False


def _open(path: Path) -> "_Header":
    if path.is_dir():
        raise ConversionError(f"{path} is a folder: give the GGUF file in it")
    if not path.is_file():
        raise ConversionError(f"{path}: no such file")
    if not is_gguf(path):
        raise ConversionError(f"{path} is not a GGUF file: download it again")
    try:
        return _Header(np.memmap(path, mode="r"))
    except _UnknownError as error:
        raise ConversionError(
            f"{path} has {error}: choose another file of the model, such as one of Q4_K_M"
        ) from error
    except (
        ValueError,
        IndexError,
        TypeError,
        ArithmeticError,
        MemoryError,
        struct.error,
    ) as error:
        raise ConversionError(
            f"{path} is cut off or damaged: download it again ({error})"
        ) from error


class _UnknownError(Exception):
    """The file is intact, but has an unsupported version or type."""


@dataclass(frozen=True)
class _Entry:
    """A tensor's description; `offset` is in bytes from the start of the tensor data."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class _Header:
    """The parsed start of a file: counts, metadata and tensor descriptions."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data = data
        self._bytes = data.data
        self._position = 0
        magic, version, num_tensors, num_keys = self._unpack("<IIQQ")
        if magic != GGUF_MAGIC:
            raise ValueError("it does not begin with GGUF")
        if version not in _VERSIONS:
            raise _UnknownError(
                f"GGUF version {version} (supported: {', '.join(map(str, _VERSIONS))})"
            )
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(*self._unpack("<I")))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._position // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for entry in entries:
            if entry.name in self.tensors:
                raise ValueError(f"tensor {entry.name} occurs twice")
            self.tensors[entry.name] = self._tensor(entry, start)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, num_bytes: int) -> memoryview:
        taken = self._bytes[self._position : self._position + num_bytes]
        if len(taken) != num_bytes:
            raise ValueError("it ends too early")
        self._position += num_bytes
        return taken

    def _string(self) -> str:
        return str(self._take(*self._unpack("<Q")), "utf-8")

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind == GGUFValueType.ARRAY:
            item, count = self._unpack("<IQ")
            return self._array(GGUFValueType(item), count)
        value = self._array(kind, 1)[0]
        if kind == GGUFValueType.FLOAT32:
            return float(str(np.float32(value)))  # 1e-05 instead of 9.999999747378752e-06
        return value

    def _array(self, kind: GGUFValueType, count: int) -> list[Any]:
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            values: list[Any] = np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()
            return values
        return [self._value(kind) for _ in range(count)]

    def _entry(self) -> _Entry:
        name = self._string()
        (num_dims,) = self._unpack("<I")
        dims = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        if not all(dims):
            raise ValueError(f"tensor {name} has a dimension of 0")
        if kind not in set(GGMLQuantizationType):
            raise _UnknownError(f"type {kind} in tensor {name}, which is not supported")
        return _Entry(name, tuple(reversed(dims)), GGMLQuantizationType(kind), offset)

    def _tensor(self, entry: _Entry, start: int) -> GGUFTensor:
        block, block_bytes = GGML_QUANT_SIZES[entry.kind]
        if not entry.shape or 0 in entry.shape:
            raise ValueError(f"tensor {entry.name} has no elements")
        size, remainder = divmod(prod(entry.shape) * block_bytes, block)
        remainder = remainder or entry.shape[-1] % block
        data = self._data[start + entry.offset : start + entry.offset + size]
        if remainder or len(data) != size:
            raise ValueError(f"tensor {entry.name} is not whole")
        rows = data.reshape(entry.shape[0], -1)
        return GGUFTensor(entry.name, entry.kind, entry.shape, rows)
