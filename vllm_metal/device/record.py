# SPDX-License-Identifier: Apache-2.0
"""Stores measurements of this machine on disk, one file per combination of what they depend on.

A row is a line of JSON: an object with one key, the row's kind, and the measurement as its value.
A later row on the same subject replaces an earlier one; kinds unknown to a release are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from metal_kernels.cache import cache_dir
from metal_kernels.selfcheck import Case, Check, Outcome, checks
from vllm_metal.device import identity, mlx_device

#: Incremented when rows of a kind change their meaning. A new kind needs no new format.
_FORMAT = 3
#: Seconds of disuse after which files of other sources, chips or MLX releases are deleted. Until
#: then they serve users who downgrade or have two installations.
_KEPT = 30 * 86400.0
_T = TypeVar("_T")


def default_folder() -> Path:
    """Returns the default folder of measurements, in the user's cache."""
    return cache_dir() / "selfcheck"


class Record:
    """Measurements of this machine with the current sources, MLX and macOS, in one file."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._path = self._folder / f"{_key()}.jsonl"

    def outcomes(self, wanted: Sequence[Case]) -> list[Outcome]:
        """Returns the known outcomes of the cases' checks, in the order of the checks."""
        found: dict[tuple[Case, Check], Outcome] = {}
        for outcome in _parse_rows(Outcome.from_json, self.rows("outcome")):
            found[outcome.case, outcome.check] = outcome
        # Outcomes are stored per layer and pool, regardless of the kernels that a case selects.
        keys = ((case, _subject(case), check) for case in wanted for check in checks(case))
        return [
            replace(found[subject, check], case=case)
            for case, subject, check in keys
            if (subject, check) in found
        ]

    def add_outcome(self, outcome: Outcome) -> None:
        self.add("outcome", replace(outcome, case=_subject(outcome.case)).to_json())

    def add_served(self, cases: Iterable[Case]) -> None:
        """Records the cases that a server uses, for `served`, and marks the file as in use."""
        with suppress(OSError):
            os.utime(self._path)
        known = list(_parse_rows(Case.from_json, self.rows("served")))
        for case in cases:
            if case not in known:
                self.add("served", case.to_json())

    def rows(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yields the rows of a kind in the order they were written."""
        return _rows(self._path, kind)

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Appends a row; without write access it is dropped, and measured again later."""
        # Each row is appended in one write, so processes may append at the same time, and an
        # interrupted one keeps its earlier rows. The leading newline ends a line cut off by a
        # crash.
        line = f"\n{json.dumps({kind: fields})}\n".encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                self._delete_old()
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError:
            return

    def forget(self) -> None:
        """Deletes all measurements, but not the record of served cases."""
        served = list(self.rows("served"))
        with suppress(OSError):
            self._path.unlink()
        for fields in served:
            self.add("served", fields)

    def _delete_old(self) -> None:
        oldest = time.time() - _KEPT
        for path in self._folder.glob("*.json*"):
            # Former formats used .json.
            if path.suffix == ".json" or path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def served(folder: Path | None = None) -> list[Case]:
    """Returns the cases that this machine's servers have used, under any release."""
    paths = sorted((folder or default_folder()).glob("*.jsonl"))
    rows = (row for path in paths for row in _rows(path, "served"))
    return list(dict.fromkeys(_parse_rows(Case.from_json, rows)))


def _rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a cut-off row, or the empty line before each row
        if isinstance(row, dict) and isinstance(row.get(kind), dict):
            yield row[kind]


def _subject(case: Case) -> Case:
    return replace(case, kernels=())


def _parse_rows(
    read: Callable[[dict[str, Any]], _T], rows: Iterable[dict[str, Any]]
) -> Iterator[_T]:
    for fields in rows:
        with suppress(TypeError, KeyError, AttributeError):  # rows of another release
            yield read(fields)


def _key() -> str:
    facts = {
        "format": _FORMAT,
        "chip": mlx_device.name("metal" if mx.metal.is_available() else "cpu"),
        **identity.software(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
