# SPDX-License-Identifier: Apache-2.0
"""Inputs of a forward besides weights and caches, and per-token values for the model's modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from vllm_metal.engine.kv_cache.layer_state import Run


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of one forward of T tokens.

    They are inputs of a compiled graph, which depends only on their names, shapes and dtypes.
    """

    input_ids: mx.array  # [T] int32
    positions: mx.array  # [1, T] int32, for RoPE; usually positions in the request
    embeddings: mx.array | None = None  # [T, 1, H], replace those of `input_ids`
    extras: tuple[tuple[str, mx.array], ...] = ()  # [T, ...] by name, for `of_rows`
    runs: tuple[Run, ...] = ()
    indices: mx.array | None = None  # [T] int32, in the request; None: equal to `positions`

    def with_extras(self, extras: Mapping[str, mx.array]) -> ForwardInputs:
        """Adds [T, ...] arrays by name, which the model's modules get from `of_rows`."""
        return replace(self, extras=self.extras + tuple(extras.items())) if extras else self


#: Per-token values of the forward that is being built, by name.
_of_rows: dict[str, mx.array] = {}


def of_rows(name: str, otherwise: mx.array | None = None) -> mx.array:
    """Returns per-token values, for a module of the model while its forward is built.

    Args:
        name: key of the values in `ForwardInputs.extras`.
        otherwise: default if the model is called without requests, as by the memory profile and
            the dense check.

    Returns:
        [T, 1, ...]; inside recurrent modules [n, L, ...], for the sequences of the call. So the
        leading axes always match the module's input.

    Raises:
        KeyError: the forward has no such value, and there is no default.
    """
    return _of_rows[name] if otherwise is None else _of_rows.get(name, otherwise)


def optional_of_rows(name: str) -> mx.array | None:
    """Like `of_rows`, but returns None if the forward has no such value."""
    return _of_rows.get(name)


def bound(inputs: ForwardInputs) -> AbstractContextManager[None]:
    """Context manager in which `of_rows` returns a forward's extras."""
    return _bound({name: array[:, None] for name, array in inputs.extras})


def regrouped(rows: mx.array) -> AbstractContextManager[None]:
    """Context manager in which `of_rows` returns the values of [n, L] int32 tokens."""
    return _bound({name: array[:, 0][rows] for name, array in _of_rows.items()})


def as_one_sequence() -> AbstractContextManager[None]:
    """Context manager in which `of_rows` returns the values of one sequence, [1, T, ...]."""
    return _bound({name: array.swapaxes(0, 1) for name, array in _of_rows.items()})


@contextmanager
def _bound(values: dict[str, mx.array]) -> Iterator[None]:
    global _of_rows
    before, _of_rows = _of_rows, values
    try:
        yield
    finally:
        _of_rows = before
