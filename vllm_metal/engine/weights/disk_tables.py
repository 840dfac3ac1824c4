# SPDX-License-Identifier: Apache-2.0
"""Embedding tables that stay on disk: the host reads the rows of a step's tokens.

Gemma 3n and Gemma 4 give each layer a vector from a table by token id, with 2.0 billion parameters
in Gemma 3n E2B. mlx-lm loads it, since MLX reads a tensor as a whole where any of it is used, but a
step needs one row per token. LongCat-Flash-Lite adds vectors of twelve tables by the hashes of the
last two to four tokens, 31 billion parameters. Qwen4-Exp adds those of 16 rows, of 51 billion
parameters in shards of rows, and DeepSeek V4.1 in each of two layers those of 24 rows, of 98
billion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
#: Patterns of modules that are called with other ids, which the forward computes from token ids.
TABLES_OF_NGRAMS = (r"ngram_embeddings\.embedders\.\d+", "ngram_embedding", r"engram\.embed")
#: With "auto", tables stay on disk if the weights would take more than this share of the memory:
#: the same as from which macOS is asked to keep weights resident (memory.wiring).
LARGE_WEIGHTS = 1 / 2
logger = init_logger(__name__)

_PARTS = ("weight", "scales", "biases")
_PUBLISHED_PARTS = {"weight", "scale"}
_OF_NGRAMS = re.compile(rf"(?:.*\.)?(?:{'|'.join(TABLES_OF_NGRAMS)})")
_TABLE = re.compile(rf"(?:.*\.)?(?:{'|'.join((*TABLES, *TABLES_OF_NGRAMS))})")
#: A stored tensor: the table, the number of a shard of its rows if any, and the part.
_STORED = re.compile(rf"({_TABLE.pattern})(?:\.shards?[._](\d+))?\.(\w+)")
#: numpy's types of safetensors' dtypes, and MLX's; numpy has no bfloat16.
_DTYPES: Mapping[str, tuple[npt.DTypeLike, mx.Dtype]] = {
    "BF16": (np.uint16, mx.bfloat16),
    "F16": (np.float16, mx.float16),
    "F32": (np.float32, mx.float32),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}
#: Dtypes of published values and their powers of two, and MLX's for the same bytes.
_PUBLISHED: Mapping[str, tuple[str, int]] = {
    "F8_E4M3": ("U32", 4),
    "I8": ("U32", 4),
    "F8_E8M0": ("U8", 1),
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
        stored: Mapping[str, Sequence[Header]],  # shards of weight, scales and biases
        dtype: mx.Dtype,  # of the result
        packing: Mapping[str, Any] | None,  # group_size, bits and mode; None: not quantized
        num_tables: int = 1,  # that share the memory for rows used last
    ) -> None:
        super().__init__()
        #: Whether it is called with a forward's token ids; otherwise with ids of their n-grams.
        self.by_token = not _OF_NGRAMS.fullmatch(path)
        #: Path of the module or list that the table is in.
        self.parent = path.rpartition(".")[0]
        self._names = {part: f"{path}.{part}" for part in stored}
        self._types = {part: _DTYPES[shards[0].dtype] for part, shards in stored.items()}
        self._widths = {part: shards[0].shape[1] for part, shards in stored.items()}
        self._dtype, self._packing = dtype, packing
        rows = [[_stored_rows(shard) for shard in shards] for shards in stored.values()]
        self._num_rows = sum(shard.num_rows for shard in rows[0])
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

    A table that the family's `sanitize` does more with than rename it or join its shards, or that
    other tools have quantized, is not among them.

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
        if _TABLE.fullmatch(path) and isinstance(module, nn.Embedding)
    }
    num_rows = {path: module.weight.shape[0] for path, module in modules.items()}
    numbers = [int(match[2] or 0) for match in map(_STORED.fullmatch, markers) if match]
    for module in modules.values():
        module.weight = mx.zeros((_MARKER_ROWS * (max(numbers) + 1), module.weight.shape[-1]))
    probe = placed_with(model, markers)
    others = without(probe, modules).arrays.values()
    weights = sum(_bytes(array.size, array.dtype, dtype) for array in others)
    headers = {name: _packed(headers[name]) for name in markers}
    weights += sum(_loaded_bytes(header, dtype) for header in headers.values())
    stored = {}
    for path, names in _stored_as(modules, probe, markers).items():
        parts = {part: [headers[name] for name in each] for part, each in names.items()}
        # Loading says so if a table has another number of rows.
        if all(sum(h.shape[0] for h in each) == num_rows[path] for each in parts.values()):
            stored[path] = parts
    found = {}
    for _, grouped in groupby(stored, lambda path: None if _OF_NGRAMS.fullmatch(path) else path):
        paths = list(grouped)
        every = [h for path in paths for shards in stored[path].values() for h in shards]
        nbytes = sum(_loaded_bytes(header, dtype) for header in every)
        if rule.keeps_on_disk(nbytes, weights, len(model.layers)):
            for path in paths:
                options = stored[path], dtype, probe.packings.get(path), len(paths)
                found[path] = DiskEmbedding(path, *options)
    return found


def _markers(headers: Mapping[str, Header]) -> dict[str, mx.array]:
    """Returns a few rows of known content for each stored tensor of a table, by its name."""
    tables: dict[str, dict[str, str]] = {}  # parts of tensors, by table and name
    for name in headers:
        if (match := _STORED.fullmatch(name)) is not None:
            tables.setdefault(match[1], {})[name] = match[3]
    found: dict[str, mx.array] = {}
    for parts in tables.values():
        if not _can_be_read([headers[name] for name in parts], set(parts.values())):
            continue
        for name in parts:
            shape = _MARKER_ROWS - 2, headers[name].shape[-1]
            # The first two rows number the tensors. Values are exact in every dtype.
            number = [mx.full((1, shape[1]), digit) for digit in divmod(len(found), 251)]
            values = (mx.arange(shape[0] * shape[1]) % 251).reshape(shape)
            marker = mx.concatenate([*number, values])
            stored = headers[name].dtype
            found[name] = marker.astype(mx.uint8 if stored in _PUBLISHED else _DTYPES[stored][1])
    return found


def _can_be_read(headers: Sequence[Header], parts: set[str]) -> bool:
    """Whether rows can be read from a table's tensors: they are MLX's, or have the same bytes."""
    dtypes = {header.dtype for header in headers}
    if parts == _PUBLISHED_PARTS:  # not with scales for blocks of rows
        return dtypes <= {*_PUBLISHED, "U8"} and len({h.shape[0] for h in headers}) == 1
    return parts <= set(_PARTS) and dtypes <= set(_DTYPES)


def without(placed: Placed, paths: Collection[str]) -> Placed:
    """Drops the arrays and packings of modules."""
    arrays = {n: a for n, a in placed.arrays.items() if n.rpartition(".")[0] not in paths}
    return Placed(arrays, {p: each for p, each in placed.packings.items() if p not in paths})


def tables_of(model: nn.Module) -> list[DiskEmbedding]:
    """Returns a model's tables on disk."""
    return [module for _, module in model.named_modules() if isinstance(module, DiskEmbedding)]


def _stored_as(
    paths: Collection[str], probe: Placed, markers: Mapping[str, mx.array]
) -> dict[str, dict[str, list[str]]]:
    """Maps modules' parts to stored tensors, those of shards in the order of their rows.

    Modules of which `sanitize` changes more than names are left out.
    """
    sources = {_content(marker): name for name, marker in markers.items()}
    found: dict[str, dict[str, list[str]]] = {path: {} for path in paths}
    for name, array in probe.arrays.items():
        path, _, part = name.rpartition(".")
        if path not in found:
            continue
        names = _joined(array, sources)
        if part not in _PARTS or names is None:
            del found[path]
        else:
            found[path][part] = names
    return {
        path: {part: names[part] for part in _PARTS if part in names}
        for path, names in found.items()
        if "weight" in names
    }


def _joined(array: mx.array, sources: Mapping[Hashable, str]) -> list[str] | None:
    """Returns names of the markers that an array consists of, by `_content`; None: it does not."""
    count, rest = divmod(len(array) if array.ndim == 2 else 0, _MARKER_ROWS)
    if rest or not 0 < count <= len(sources):
        return None  # not to be read: a table as it is stored
    names = [sources.get(_content(rows)) for rows in mx.split(array, count)]
    return [name for name in names if name] if all(names) else None


def _content(array: mx.array) -> Hashable:
    # Not the dtype: values may be packed in other words.
    return len(array), np.array(array.view(mx.uint8)).tobytes()


def _packed(header: Header) -> Header:
    """Returns a header as if the tensor had been stored in MLX's format with the same bytes."""
    dtype, count = _PUBLISHED.get(header.dtype, (header.dtype, 1))
    return replace(header, dtype=dtype, shape=(header.shape[0], header.shape[1] // count))


def _stored_rows(header: Header) -> StoredRows:
    return StoredRows(header.file, header.offset, header.shape[0], header.nbytes // header.shape[0])


def _loaded_bytes(header: Header, dtype: mx.Dtype) -> int:
    return _bytes(prod(header.shape), _DTYPES[header.dtype][1], dtype)


def _bytes(count: int, stored: mx.Dtype, dtype: mx.Dtype) -> int:
    return count * (dtype if mx.issubdtype(stored, mx.floating) else stored).size
