# SPDX-License-Identifier: Apache-2.0
"""A row of the table of docs/vllm-settings.md: the effect of one vLLM setting."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["honored", "without meaning", "refused"]


@dataclass(frozen=True)
class Row:
    """kind: what becomes of it. said: a test that shows it, where vLLM's own code gets it, why it
    has no meaning here, or what is said to who sets it."""

    kind: Kind
    said: str


#: By setting name, in vLLM's order.
Table = dict[str, Row]


def honored(by_test: Mapping[str, str]) -> Table:
    """Maps settings to the test that shows their effect on a result or a limit.

    by_test: maps "file.py::test_name" below tests/ to space-separated settings.
    """
    return _rows("honored", {f"`{test}`": names for test, names in by_test.items()})


def read_by_vllm(by_reader: Mapping[str, str]) -> Table:
    """Maps settings to the vLLM code that reads them and runs unchanged."""
    return _rows("honored", by_reader)


def passed_on(by_place: Mapping[str, str]) -> Table:
    """Maps settings to the field of vLLM's configuration where such code reads them."""
    return {
        name: Row("honored", f"vLLM's own code reads it, as `{place}`")
        for name, place in by_place.items()
    }


def without_meaning(by_reason: Mapping[str, str]) -> Table:
    """Maps space-separated settings to a reason."""
    return _rows("without meaning", by_reason)


def refused(by_reason: Mapping[str, str]) -> Table:
    """Maps rejected settings to the reason in the error."""
    return _rows("refused", by_reason)


def _rows(kind: Kind, by_reason: Mapping[str, str]) -> Table:
    rows = ((name, said) for said, names in by_reason.items() for name in names.split())
    return union({name: Row(kind, said)} for name, said in rows)


def union(tables: Iterable[Table]) -> Table:
    """Merges tables with disjoint settings."""
    joined: Table = {}
    for table in tables:
        twice = joined.keys() & table.keys()
        assert not twice, f"{sorted(twice)} stand in the table twice"
        joined |= table
    return joined


def differences(table: Table, fields: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns vLLM's fields that the table lacks, and rows that are not fields."""
    found = list(fields)
    return [f for f in found if f not in table], sorted(table.keys() - set(found))


def of_kind(table: Table, kind: Kind) -> list[str]:
    """Returns the names of the settings of one kind."""
    return [name for name, row in table.items() if row.kind == kind]


def named_test(row: Row) -> tuple[str, str] | None:
    """Returns file and name of the test that a row names, or None."""
    if not row.said.startswith("`") or "::" not in row.said:
        return None
    file, _, name = row.said.strip("`").partition("::")
    return file, name
