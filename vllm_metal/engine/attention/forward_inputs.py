# SPDX-License-Identifier: Apache-2.0
"""ForwardInputs decides what a forward reads besides weights and caches, each a graph's input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx

from vllm_metal.engine.kv_cache.layer_state import Run


@dataclass(frozen=True)
class ForwardInputs:
    """Arrays that one forward of T rows reads.

    All of them are inputs of a compiled graph: only their names, shapes and dtypes are part of it.
    """

    input_ids: mx.array  # [T] int32
    positions: mx.array  # [1, T] int32, what ropes turn by; as a rule the place in the request
    embeddings: mx.array | None = None  # [T, 1, H], in place of those of `input_ids`
    extras: tuple[tuple[str, mx.array], ...] = ()  # [T, ...] by name, for modules that ask for them
    runs: tuple[Run, ...] = ()

    def with_extras(self, extras: Mapping[str, mx.array]) -> ForwardInputs:
        """Adds arrays of T rows by name; `of_rows` gives them to the modules of the model."""
        return replace(self, extras=self.extras + tuple(extras.items())) if extras else self


#: Values of the rows of the forward that is being built, by name.
_of_rows: dict[str, mx.array] = {}


def of_rows(name: str, otherwise: mx.array | None = None) -> mx.array:
    """A value of each row, for a module of the model while its forward is built.

    Args:
        name: of the value.
        otherwise: what stands for it where the model is called without requests, as the memory
            profile and the dense check do.

    Returns:
        [T, 1, ...] as a rule. Inside a module that goes from token to token, [n, L, ...]: of the
        sequences that this call of it computes. So it always goes with the module's own input.

    Raises:
        KeyError: the forward has no such value, and nothing stands for it.
    """
    return _of_rows[name] if otherwise is None else _of_rows.get(name, otherwise)


def optional_of_rows(name: str) -> mx.array | None:
    """As `of_rows`; None where the forward that is being built has no such value."""
    return _of_rows.get(name)


def bound(inputs: ForwardInputs) -> AbstractContextManager[None]:
    """Within, `of_rows` knows the extras of a forward."""
    return _bound({name: array[:, None] for name, array in inputs.extras})


def regrouped(rows: mx.array) -> AbstractContextManager[None]:
    """Within, `of_rows` gives the values of some rows, as sequences.

    Args:
        rows: [n, L] int32, of the forward's T.
    """
    return _bound({name: array[:, 0][rows] for name, array in _of_rows.items()})


def as_one_sequence() -> AbstractContextManager[None]:
    """Within, `of_rows` gives the values of all rows as one sequence, [1, T, ...]."""
    return _bound({name: array.swapaxes(0, 1) for name, array in _of_rows.items()})


@contextmanager
def _bound(values: dict[str, mx.array]) -> Iterator[None]:
    global _of_rows
    before, _of_rows = _of_rows, values
    try:
        yield
    finally:
        _of_rows = before
