# SPDX-License-Identifier: Apache-2.0
"""Keeps what was found on this machine on disk: rows by all that could change a finding.

A row is a line of JSON: an object of one key, its kind, whose value has the finding. Rows are only
ever appended, each in one write, so processes may do so at once, and one that is interrupted leaves
what it has found. Of rows on one subject the last one counts. A new choice is a row of a new
subject, or kind; kinds that a release does not know it leaves alone.
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

#: Changes when rows of a kind change their meaning.
_FORMAT = 3
#: Files of other sources, chips or releases of MLX are deleted when nobody has used them for so
#: many seconds. Until then they serve those who go back, or have two installations.
_KEPT = 30 * 86400.0
_T = TypeVar("_T")


def default_folder() -> Path:
    """In the user's cache folder."""
    return cache_dir() / "selfcheck"


class Record:
    """The rows on this machine, with these sources, this MLX and this macOS."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder` is where records are kept; None: `default_folder`."""
        self._folder = folder or default_folder()
        self._path = self._folder / f"{_key()}.jsonl"

    def outcomes(self, wanted: Sequence[Case]) -> list[Outcome]:
        """What is known of the checks of these cases, in their order.

        Results are kept by layer and pool, whichever kernels a case asks for.
        """
        found: dict[tuple[Case, Check], Outcome] = {}
        for outcome in _known(Outcome.from_json, self.rows("outcome")):
            found[outcome.case, outcome.check] = outcome
        asked = ((case, _subject(case), check) for case in wanted for check in checks(case))
        return [
            replace(found[subject, check], case=case)
            for case, subject, check in asked
            if (subject, check) in found
        ]

    def add_outcome(self, outcome: Outcome) -> None:
        self.add("outcome", replace(outcome, case=_subject(outcome.case)).to_json())

    def add_served(self, cases: Iterable[Case]) -> None:
        """Notes what a server asks for, for `served`; its record is then in use."""
        with suppress(OSError):
            os.utime(self._path)
        known = list(_known(Case.from_json, self.rows("served")))
        for case in cases:
            if case not in known:
                self.add("served", case.to_json())

    def rows(self, kind: str) -> Iterator[dict[str, Any]]:
        """The rows of a kind, in the order they were written."""
        return _rows(self._path, kind)

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Appends a row. Where the folder cannot be written, what was found is found again."""
        # A line that a process could not finish is ended first.
        line = f"\n{json.dumps({kind: fields})}\n".encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self._path.exists():
                self._delete_old()
            where = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(where, line)
            finally:
                os.close(where)
        except OSError:
            return

    def forget(self) -> None:
        """Deletes what was found here; what was served is remembered."""
        served = list(self.rows("served"))
        with suppress(OSError):
            self._path.unlink()
        for fields in served:
            self.add("served", fields)

    def _delete_old(self) -> None:
        """Files of former formats, and those that nobody has used for long."""
        oldest = time.time() - _KEPT
        for path in self._folder.glob("*.json*"):
            if path.suffix == ".json" or path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def served(folder: Path | None = None) -> list[Case]:
    """What this machine's servers have asked for, by whatever release."""
    paths = sorted((folder or default_folder()).glob("*.jsonl"))
    rows = (row for path in paths for row in _rows(path, "served"))
    return list(dict.fromkeys(_known(Case.from_json, rows)))


def _rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off, or the empty line before each row
        if isinstance(row, dict) and isinstance(row.get(kind), dict):
            yield row[kind]


def _subject(case: Case) -> Case:
    return replace(case, kernels=())


def _known(read: Callable[[dict[str, Any]], _T], rows: Iterable[dict[str, Any]]) -> Iterator[_T]:
    """What the rows say, but for those of another release."""
    for fields in rows:
        with suppress(TypeError, KeyError, AttributeError):
            yield read(fields)


def _key() -> str:
    """A digest of all that could change a finding."""
    facts = {
        "format": _FORMAT,
        "chip": mlx_device.name("metal" if mx.metal.is_available() else "cpu"),
        **identity.software(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
