# SPDX-License-Identifier: Apache-2.0
"""Which command runs a test, and the table that says so in docs/testing.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
#: Commands that select by marker; each test belongs to one. `make test` has those without a marker.
COMMANDS = ("make test", "make test-more", "make test-slow")
#: Folders of files that take a minute or so, which workers had better not get last.
LONG_FIRST = ("e2e", "upstream", "darwin", "commands")
#: What a run of pytest collected, before it selected by markers or names.
COLLECTED = pytest.StashKey[list[pytest.Item]]()


def command_of(item: pytest.Item) -> str:
    """The one command that runs a test."""
    if item.get_closest_marker("slow"):
        return "make test-slow"
    return "make test-more" if item.get_closest_marker("more") else "make test"


def rows(items: Iterable[pytest.Item]) -> dict[str, str]:
    """The table's lines, by file: of each that has tests which `make test` leaves out."""
    files: dict[str, dict[str, set[str]]] = {}  # names of test functions by command
    for item in items:
        commands = files.setdefault(item.path.relative_to(TESTS).as_posix(), {})
        name = getattr(item, "originalname", item.name)
        commands.setdefault(command_of(item), set()).add(name)
    return {
        file: f"| `{file}` | {' | '.join(_cell(command, commands) for command in COMMANDS[1:])} |"
        for file, commands in sorted(files.items())
        if set(commands) != {COMMANDS[0]}
    }


def _cell(command: str, commands: Mapping[str, set[str]]) -> str:
    """What a command runs of a file; a function may be shared with others, by its parameters."""
    if set(commands) == {command}:
        return "all"
    others = set().union(*(names for other, names in commands.items() if other != command))
    return ", ".join(
        f"`{name.removeprefix('test_')}`" + (" in part" if name in others else "")
        for name in sorted(commands.get(command, ()))
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """As a plugin, `-p selection --collect-only`: prints the table."""
    print("\n".join(rows(session.config.stash[COLLECTED]).values()))
