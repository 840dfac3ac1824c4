# SPDX-License-Identifier: Apache-2.0
"""Writes safetensors files piecewise, so that no tensor is ever entirely in memory.

Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to write; `dtype` is F32, F16, BF16 or U32, as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes per row, an index of the first axis."""
        return prod(self.shape[1:]) * _ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.row_bytes


Write = Callable[[str, int, npt.NDArray[Any]], None]
"""Writes rows of a tensor, given its name, the first row's index, and the rows."""


@contextmanager
def safetensors_file(path: Path, tensors: Sequence[StoredTensor]) -> Iterator[Write]:
    """Creates a file of its final size; yields a function that writes rows in any order."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    locations: dict[str, tuple[int, int]] = {}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        locations[tensor.name] = (start, tensor.row_bytes)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the data to 8 bytes
    data_start = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(data_start + end)

        def write(name: str, row: int, values: npt.NDArray[Any]) -> None:
            start, row_bytes = locations[name]
            if values.nbytes != len(values) * row_bytes:
                raise ValueError(
                    f"{name}: rows of {values.nbytes // len(values)} bytes, not {row_bytes}"
                )
            file.seek(data_start + start + row * row_bytes)
            file.write(np.ascontiguousarray(values).data)

        yield write
