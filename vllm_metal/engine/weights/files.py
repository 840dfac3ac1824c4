# SPDX-License-Identifier: Apache-2.0
"""Finds a model folder's weight files, checks that they are complete, and opens their arrays.

Format of safetensors: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from vllm_metal.identity.model_files import (
    AGAIN,
    INDEX,
    ModelLoadError,
    first_line,
    is_gguf,
    unreadable,
    weight_files,
    weight_map,
)

_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_LFS = b"version "  # start of a Git LFS pointer
#: Dtypes of safetensors that MLX does not read.
_UNSUPPORTED = ("F64", "F8_E5M2", "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2FNUZ", "F8_E4M3FNUZ")


@dataclass(frozen=True)
class Header:
    """A stored tensor as described by its file's header."""

    dtype: str  # safetensors' name, such as "BF16" or "F8_E4M3"
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    offset: int  # in the file


def check_weight_files(folder: Path) -> None:
    """Checks the header and size of each weight file.

    Raises:
        ModelLoadError: a file is missing, truncated or not safetensors, or two files have a tensor
            of the same name; the message names it.
    """
    if is_gguf(folder):
        for path in weight_files(folder):
            if not path.is_file():
                raise ModelLoadError(f"{path} is missing: it was there when its header was read")
        return
    headers(folder)


def headers(folder: Path) -> dict[str, Header]:
    """Reads the headers of a model's tensors by name, each from the file that the index lists.

    Raises ModelLoadError: see `check_weight_files`.
    """
    if is_gguf(folder):
        raise ModelLoadError(
            f"{folder} refers to a GGUF file, which is not supported here: only "
            "safetensors files are. Use the model's own checkpoint"
        )
    files = weight_files(folder)
    if not files and (others := sorted(folder.glob("*.bin"))):
        raise ModelLoadError(
            f"{others[0]} is not supported: choose a checkpoint with safetensors files, or a "
            "GGUF file"
        )
    if not files:
        raise ModelLoadError(
            f"{folder / 'model.safetensors'} is missing: the folder has no weights; {AGAIN}"
        )
    index = folder / INDEX
    mapped = weight_map(index) if index.is_file() else {}
    for path in files:
        if not os.path.lexists(path):
            raise ModelLoadError(f"{path} is missing: {INDEX} names it; {AGAIN}")
    return headers_of(files, lambda name, path: mapped.get(name, path.name) == path.name)


def headers_of(
    files: Iterable[Path], counts: Callable[[str, Path], bool] = lambda name, path: True
) -> dict[str, Header]:
    """Reads the headers of tensors in safetensors files; `counts` selects tensors by name and file.

    Raises ModelLoadError: a file is unreadable or truncated, or two have a tensor of the same name.
    """
    found: dict[str, Header] = {}
    for path in files:
        for name, header in _headers_in(path).items():
            if not counts(name, path):
                continue
            if name in found:
                raise ModelLoadError(
                    f"{name} is stored twice, in {found[name].file} and {path.name}: remove the "
                    "file that does not belong to the model"
                )
            found[name] = header
    return found


def arrays_of(found: Mapping[str, Header]) -> dict[str, mx.array]:
    """Opens stored tensors as lazy arrays by name; 8-bit floats, which MLX lacks, become uint8.

    Raises ModelLoadError: a tensor's dtype is not supported.
    """
    for name, header in found.items():
        if header.dtype in _UNSUPPORTED:
            raise ModelLoadError(
                f"{name} in {header.file} is stored as {header.dtype}, which MLX does not read: "
                "choose a checkpoint in another format"
            )
    arrays: dict[str, mx.array] = {}
    for path in sorted({header.file for header in found.values()}):
        loaded = cast(dict[str, mx.array], mx.load(str(path)))
        arrays |= {n: a for n, a in loaded.items() if n in found and found[n].file == path}
    return arrays


def stored_arrays(folder: Path) -> Iterator[tuple[str, mx.array]]:
    """Yields names and lazy arrays of a model's weight files."""
    yield from arrays_of(headers(folder)).items()


def _headers_in(path: Path) -> dict[str, Header]:
    try:
        size = path.stat().st_size
        header: dict[str, Any] = {}
        with path.open("rb") as file:
            first = file.read(8)
            header_size = int.from_bytes(first, "little")
            _check_start(path, first, header_size)
            if size >= 8 + header_size:
                header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        found = {
            name: Header(
                str(stored["dtype"]),
                tuple(stored["shape"]),
                path,
                stored["data_offsets"][1] - stored["data_offsets"][0],
                8 + header_size + stored["data_offsets"][0],
            )
            for name, stored in header.items()
        }
        end = max((stored["data_offsets"][1] for stored in header.values()), default=0)
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
        raise ModelLoadError(
            f"{path} is not a readable safetensors file ({first_line(error)}); {AGAIN}"
        ) from error
    if size < 8 + header_size + end:
        raise ModelLoadError(
            f"{path} is cut off: it has {size:,} bytes of {8 + header_size + end:,}; {AGAIN}"
        )
    return found


def _check_start(path: Path, first: bytes, header_size: int) -> None:
    """Rejects files that do not start like safetensors, such as a text in place of the weights."""
    if header_size <= _MAX_HEADER:
        return
    if not first.isascii():
        raise ModelLoadError(f"{path} is not a safetensors file; {AGAIN}")
    why = f"it begins with {first.decode()!r}, as a page or a message does; {AGAIN}"
    if first == _LFS:
        why = "it is a pointer of Git LFS: fetch the file itself by `git lfs pull`, or download it"
    raise ModelLoadError(f"{path} has no weights: {why}")
