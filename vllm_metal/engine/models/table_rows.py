# SPDX-License-Identifier: Apache-2.0
"""Hands a step the rows of its tokens in tables on disk, which the host reads late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.engine.attention.forward_inputs import ForwardInputs
from vllm_metal.engine.weights.disk_tables import LateRows, reading_late, tables_of


@dataclass(frozen=True)
class _Reserved:
    """A forward whose rows are not read yet."""

    input_ids: mx.array  # [T] int32
    extras: dict[str, mx.array]


class TableRows:
    """Rows of a model's tables on disk.

    A forward is built on arrays without content, while the device computes the step before. The
    host writes the rows into their memory once it knows the tokens, and before it submits the step.
    If the forward computes a table's ids, as of n-grams, the device first computes these, and what
    they wait for.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        """`model`: None has no tables on disk."""
        tables = [] if model is None else tables_of(model)
        self._tables = [table for table in tables if table.by_token]
        #: Whether a forward computes ids of some tables, so that it cannot be compiled.
        self.follow_forward = len(self._tables) < len(tables)
        self._reserved: _Reserved | None = None
        self._late: list[LateRows] = []

    @property
    def are_due(self) -> bool:
        """Whether the forward built last waits for its rows."""
        return self._reserved is not None or bool(self._late)

    def reserve(self, inputs: ForwardInputs) -> ForwardInputs:
        """Adds arrays for the rows to a forward's inputs; call `read` before they are computed."""
        self._reserved, self._late = None, []
        if not self._tables:
            return inputs
        extras: dict[str, mx.array] = {}
        for table in self._tables:
            extras |= table.reserve(inputs.input_ids.size)
        self._reserved = _Reserved(inputs.input_ids, extras)
        return inputs.with_extras(extras)

    @contextmanager
    def built(self, early: bool) -> Iterator[None]:
        """Context in which a forward is built; `early`: parts of it are computed meanwhile."""
        if early or not self.follow_forward:
            yield
            return
        with reading_late(self._late):
            yield

    def read(self) -> None:
        """Reads the rows that are due; waits for the tokens if the device is yet to compute them.

        Raises TableError: a file cannot be read.
        """
        reserved, self._reserved = self._reserved, None
        late, self._late = self._late, []
        if reserved is not None:
            ids_np = np.array(reserved.input_ids)
            for table in self._tables:
                table.fill(ids_np, reserved.extras)
        # One module after another: layers may share a storage, and kernels that read a layer's
        # state wait for what the layers before wrote, which depends on their rows.
        for _, group in groupby(late, lambda rows: rows.table.parent):
            together = list(group)  # the device is waited for once
            mx.eval([rows.ids for rows in together])
            for rows in together:
                rows.read()
