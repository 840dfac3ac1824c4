# SPDX-License-Identifier: Apache-2.0
"""A model folder's weight files: whether they exist and are complete, and the arrays in them.

Format of safetensors: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import mlx.core as mx

_INDEX = "model.safetensors.index.json"
_AGAIN = "download it again, or convert the model again"


class ModelLoadError(RuntimeError):
    """The model folder cannot be loaded; the message says why and what to do."""


def check_weight_files(folder: Path) -> None:
    """Checks the header and the size of each file that mlx-lm will read.

    Raises:
        ModelLoadError: a file is missing, truncated or no safetensors file; the message names it.
    """
    paths = _weight_files(folder)
    index = folder / _INDEX
    if index.is_file():
        for name in sorted(_named_in(index)):
            if not (folder / name).is_file():
                raise ModelLoadError(f"{folder / name} is missing: {_INDEX} names it; {_AGAIN}")
    elif not paths:
        raise ModelLoadError(
            f"{folder / 'model.safetensors'} is missing: the folder has no weights"
        )
    for path in paths:
        _check(path)


def stored_arrays(folder: Path) -> Iterator[tuple[str, mx.array]]:
    """Yields names and arrays of the weight files; each is read when it is evaluated."""
    for path in _weight_files(folder):
        yield from cast(dict[str, mx.array], mx.load(str(path))).items()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model*.safetensors"))


def _named_in(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise ModelLoadError(f"{index} is unreadable ({_first_line(error)}); {_AGAIN}") from error


def _check(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if size >= 8 + header_size:
                header = json.loads(file.read(header_size))
                ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
                header_size += max(ends, default=0)
    except (ValueError, KeyError, AttributeError, TypeError, IndexError, OSError) as error:
        raise ModelLoadError(
            f"{path} is no readable safetensors file ({_first_line(error)}); {_AGAIN}"
        ) from error
    if size < 8 + header_size:
        raise ModelLoadError(
            f"{path} is cut off: it has {size:,} bytes of {8 + header_size:,}; {_AGAIN}"
        )


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
