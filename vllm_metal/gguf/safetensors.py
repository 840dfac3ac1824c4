# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files piece by piece, so that no tensor is ever whole in memory.

Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor to be written. `dtype` is safetensors' name: F32, F16, BF16 or U32."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one step along the first axis."""
        return prod(self.shape[1:]) * _ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape[0] * self.row_bytes


class SafetensorsFile:
    """A file whose header and size are written first, and whose rows then come in any order."""

    def __init__(self, path: Path, tensors: Sequence[StoredTensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
        self._at: dict[str, tuple[int, int]] = {}
        end = 0
        for tensor in tensors:
            start, end = end, end + tensor.num_bytes
            header[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
            self._at[tensor.name] = (start, tensor.row_bytes)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins 8-byte aligned
        self._data_start = 8 + len(text)
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data_start + end)

    def write(self, name: str, row: int, values: npt.NDArray[Any]) -> None:
        """Write `values` as the rows of tensor `name` from `row` on."""
        start, row_bytes = self._at[name]
        if values.nbytes != len(values) * row_bytes:
            raise ValueError(
                f"{name}: rows of {values.nbytes // len(values)} bytes, not {row_bytes}"
            )
        self._file.seek(self._data_start + start + row * row_bytes)
        self._file.write(np.ascontiguousarray(values).data)

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
