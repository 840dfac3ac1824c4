# SPDX-License-Identifier: Apache-2.0
"""Embedding tables that stay on disk: the host reads the rows of a step's tokens.

Gemma 3n and Gemma 4 give each layer a vector from a table by token id, with 2.0 billion parameters
in Gemma 3n E2B. mlx-lm loads it, since MLX reads a tensor as a whole where any of it is used, but a
step needs one row per token. LongCat-Flash-Lite adds vectors of twelve tables by the hashes of the
last two to four tokens, 31 billion parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger

from vllm_metal.engine.attention.forward_inputs import optional_of_rows
from vllm_metal.engine.weights.files import Header
from vllm_metal.engine.weights.lazy import has_outlines_only
from vllm_metal.engine.weights.placing import Placed, copy_modules
from vllm_metal.engine.weights.table_reader import CACHE_BYTES, StoredRows, TableReader

#: Modules of mlx-lm's and mlx-vlm's families that are called with a forward's token ids, besides
#: the embedding of tokens, which is often the head as well.
TABLES = ("embed_tokens_per_layer", "value_embeds")
#: Lists of modules that are called with other ids, which the forward computes from token ids.
LISTS_OF_TABLES = ("ngram_embeddings.embedders",)
#: With "auto", tables stay on disk if the weights would take more than this share of the memory:
#: the same as from which macOS is asked to keep weights resident (memory.wiring).
LARGE_WEIGHTS = 1 / 2
logger = init_logger(__name__)

_PARTS = ("weight", "scales", "biases")
#: numpy's types of safetensors' dtypes, and MLX's; numpy has no bfloat16.
_DTYPES: Mapping[str, tuple[npt.DTypeLike, mx.Dtype]] = {
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}
_MARKER_ROWS = 8


@dataclass(frozen=True)
class TableRule:
    """Decides which tables stay on disk."""

    choice: str  # "auto", "memory" or "disk"
    memory: int  # bytes of the device that this process may use

    def keeps_on_disk(self, table: int, weights: int, num_layers: int) -> bool:
        """Decides by bytes of the table, and of all weights with it."""
        if self.choice != "auto":
            return self.choice == "disk"
        is_large = weights > LARGE_WEIGHTS * self.memory
        return is_large and table > (weights - table) / num_layers  # more than a layer

    def log(self, on_disk: Mapping[str, DiskEmbedding]) -> None:
        """Logs which tables stay on disk."""
        for path, table in on_disk.items():
            size = table.nbytes / 2**30
            logger.info("%s stays on disk: %.2f GiB, of which tokens' rows are read", path, size)
        if self.choice == "disk" and not on_disk:
            logger.warning(
                "embedding_tables=disk of --additional-config has no effect: no table of this "
                "checkpoint can stay on disk. docs/embedding-tables.md lists those that can"
            )


@dataclass(frozen=True)
class LateRows:
    """Rows that a forward uses before they are read, since the device computes their ids."""

    table: DiskEmbedding
    ids: mx.array
    extras: Mapping[str, mx.array]  # from `DiskEmbedding.reserve`

    def read(self) -> None:
        """Waits for the ids and reads the rows; raises TableError."""
        self.table.fill(np.array(self.ids).reshape(-1), self.extras)


_late: list[LateRows] | None = None  # None: rows are read when a table is called


@contextmanager
def reading_late(rows: list[LateRows]) -> Iterator[None]:
    """Makes tables add to `rows` what they are called with, instead of reading it at once.

    The caller reads them before the arrays that were built in the context are computed.
    """
    global _late
    before, _late = _late, rows
    try:
        yield
    finally:
        _late = before


class DiskEmbedding(nn.Module):
    """Replaces an embedding, quantized by MLX's tools or not, whose rows are read from files."""

    def __init__(
        self,
        path: str,
        stored: Mapping[str, Header],  # by part: weight, and scales and biases if quantized
        dtype: mx.Dtype,  # of the result
        packing: Mapping[str, Any] | None,  # group_size, bits and mode; None: not quantized
        num_tables: int = 1,  # that share the memory for rows used last
    ) -> None:
        super().__init__()
        #: Whether it is called with a forward's token ids, and not with ids made of them.
        self.by_token = _list_of(path) is None
        self._names = {part: f"{path}.{part}" for part in stored}
        self._types = {part: _DTYPES[header.dtype] for part, header in stored.items()}
        self._widths = {part: header.shape[1] for part, header in stored.items()}
        self._dtype, self._packing = dtype, packing
        rows = [_stored_rows(header) for header in stored.values()]
        self._num_rows = rows[0].num_rows
        share = (CACHE_BYTES // num_tables,) if num_tables > 1 else ()
        self._reader = None if has_outlines_only() else TableReader(rows, *share)  # None: zeros

    @property
    def nbytes(self) -> int:
        """Bytes of the table in the files."""
        return self._num_rows * sum(
            width * np.dtype(self._types[part][0]).itemsize for part, width in self._widths.items()
        )

    def reserve(self, num_tokens: int) -> dict[str, mx.array]:
        """Makes arrays for a forward's rows, by the name of the extra; `fill` writes into them."""
        made = {}
        for part, width in self._widths.items():
            stored, dtype = self._types[part]
            if self._reader is None:
                made[self._names[part]] = mx.zeros((num_tokens, width), dtype)
                continue
            # Not a number until they are filled, in every dtype: a use before that must not pass.
            empty = np.full((num_tokens, width * dtype.size), 0xFF, np.uint8)
            made[self._names[part]] = mx.array(empty.view(stored))
        return made

    def fill(self, ids_np: np.ndarray, extras: Mapping[str, mx.array]) -> None:
        """Reads the rows of [T] token ids into the memory of arrays that `reserve` made.

        Nothing may have computed with the arrays before. Raises TableError.
        """
        if self._reader is not None:
            # Ids beyond the table stand for images or sound, with the row of token 0: Gemma 3n.
            ids_np = np.where((ids_np >= 0) & (ids_np < self._num_rows), ids_np, 0)
            arrays = [np.array(extras[name], copy=False) for name in self._names.values()]
            self._reader.read(ids_np, [array.view(np.uint8) for array in arrays])

    def __call__(self, ids: mx.array) -> mx.array:
        """Returns the rows of [...] token ids, [..., dims].

        Uses the rows that were read for the step. If there are none, waits for `ids` and reads,
        but see `reading_late`.
        """
        extras = {name: optional_of_rows(name) for name in self._names.values()}
        if any(rows is None for rows in extras.values()):
            reserved = self.reserve(ids.size)
            late = LateRows(self, ids, reserved)
            if _late is not None:
                _late.append(late)
            elif self._reader is not None:
                late.read()
            extras = {name: rows.reshape(*ids.shape, -1) for name, rows in reserved.items()}
        weight, scales, biases = (self._part(part, extras) for part in _PARTS)
        if self._packing is None or scales is None:
            return cast(mx.array, weight)
        return mx.dequantize(cast(mx.array, weight), scales, biases, **self._packing)

    def _part(self, part: str, extras: Mapping[str, mx.array | None]) -> mx.array | None:
        """Returns rows of a part (weight, scales or biases) in the loader's dtype, or None."""
        rows = extras.get(self._names.get(part, ""))
        if rows is None:
            return None
        stored = self._types[part][1]
        rows = rows if rows.dtype == stored else rows.view(stored)
        return rows.astype(self._dtype) if mx.issubdtype(stored, mx.floating) else rows


def find(
    model: nn.Module,
    headers: Mapping[str, Header],
    placed_with: Callable[[nn.Module, Mapping[str, mx.array]], Placed],
    dtype: mx.Dtype,
    rule: TableRule,
) -> dict[str, DiskEmbedding]:
    """Returns the tables of a model that stay on disk, by path.

    A table that the family's `sanitize` does more with than rename it, or that other tools have
    quantized, is not among them.

    Args:
        model: the model, without weights.
        headers: the checkpoint's tensors; empty for formats other than safetensors.
        placed_with: maps the checkpoint's tensors to a model's, with some of them replaced.
        dtype: dtype of activations.
        rule: decides which tables stay on disk.
    """
    if not (markers := _markers(headers)):
        return {}
    # `sanitize` gets a few rows of known content in place of the tables, and a copy of the model.
    model = copy_modules(model)
    modules = {
        path: module
        for path, module in model.named_modules()
        if _is_table(path) and isinstance(module, nn.Embedding)
    }
    for module in modules.values():
        module.weight = mx.zeros((_MARKER_ROWS, module.weight.shape[-1]))
    probe = placed_with(model, markers)
    others = without(probe, modules).arrays.values()
    weights = sum(_bytes(array.size, array.dtype, dtype) for array in others)
    weights += sum(_loaded_bytes(headers[name], dtype) for name in markers)
    stored = {path: _stored_as(path, probe, markers) for path in modules}
    headers_of = {
        path: {part: headers[name] for part, name in names.items()}
        for path, names in stored.items()
        if names is not None
    }
    found = {}
    for _, grouped in groupby(headers_of, lambda path: _list_of(path) or path):
        paths = list(grouped)
        parts = [header for path in paths for header in headers_of[path].values()]
        nbytes = sum(_loaded_bytes(header, dtype) for header in parts)
        if rule.keeps_on_disk(nbytes, weights, len(model.layers)):
            for path in paths:
                options = headers_of[path], dtype, probe.packings.get(path), len(paths)
                found[path] = DiskEmbedding(path, *options)
    return found


def _list_of(path: str) -> str | None:
    """Path of the list of tables that has a module; None if it is in no such list."""
    parent, _, index = path.rpartition(".")
    return parent if index.isdigit() and parent.endswith(LISTS_OF_TABLES) else None


def _is_table(path: str) -> bool:
    return path.rpartition(".")[2] in TABLES or _list_of(path) is not None


def _markers(headers: Mapping[str, Header]) -> dict[str, mx.array]:
    """Returns a few rows of known content for each stored tensor of a table, by its name."""
    stems: dict[str, list[str]] = {}
    for name in headers:
        stem, _, part = name.rpartition(".")
        if _is_table(stem):
            stems.setdefault(stem, []).append(part)
    found = {}
    for number, (stem, parts) in enumerate(stems.items()):
        names = {part: f"{stem}.{part}" for part in parts}
        # Other parts are of formats that are not MLX's.
        if not set(parts) <= set(_PARTS) or any(
            headers[n].dtype not in _DTYPES for n in names.values()
        ):
            continue
        for part, name in names.items():
            shape = _MARKER_ROWS, headers[name].shape[-1]
            # Another content for each part of each table.
            values = mx.arange(shape[0] * shape[1]) % 251 + _PARTS.index(part) + 3 * number
            found[name] = values.reshape(shape).astype(_DTYPES[headers[name].dtype][1])
    return found


def without(placed: Placed, paths: Collection[str]) -> Placed:
    """Drops the arrays and packings of modules."""
    arrays = {n: a for n, a in placed.arrays.items() if n.rpartition(".")[0] not in paths}
    return Placed(arrays, {p: each for p, each in placed.packings.items() if p not in paths})


def tables_of(model: nn.Module) -> list[DiskEmbedding]:
    """Returns a model's tables on disk."""
    return [module for _, module in model.named_modules() if isinstance(module, DiskEmbedding)]


def _stored_as(path: str, probe: Placed, markers: Mapping[str, mx.array]) -> dict[str, str] | None:
    """Maps a module's parts to stored tensors; None if `sanitize` changes more than names."""
    found = {}
    for name, array in probe.arrays.items():
        module, _, part = name.rpartition(".")
        if module != path:
            continue
        source = next((n for n, marker in markers.items() if _equal(array, marker)), None)
        if source is None or part not in _PARTS:
            return None
        found[part] = source
    return {part: found[part] for part in _PARTS if part in found} if "weight" in found else None


def _equal(array: mx.array, marker: mx.array) -> bool:
    same = array.dtype == marker.dtype and array.shape == marker.shape
    return same and bool(mx.array_equal(array, marker))


def _stored_rows(header: Header) -> StoredRows:
    return StoredRows(header.file, header.offset, header.shape[0], header.nbytes // header.shape[0])


def _loaded_bytes(header: Header, dtype: mx.Dtype) -> int:
    return _bytes(prod(header.shape), _DTYPES[header.dtype][1], dtype)


def _bytes(count: int, stored: mx.Dtype, dtype: mx.Dtype) -> int:
    return count * (dtype if mx.issubdtype(stored, mx.floating) else stored).size
