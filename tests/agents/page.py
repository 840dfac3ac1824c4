# SPDX-License-Identifier: Apache-2.0
"""Writes the client table of docs/agents.md: `python -m agents.page`, from `tests/`."""

from collections.abc import Iterable
from pathlib import Path

from agents.clients import CLIENTS
from agents.results import Result, load
from agents.tasks import SDKS

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"

_INTERFACES = {"openai": "Chat Completions", "anthropic": "Messages"}
_PACKAGES = {name: f"`{name}` (library)" for name in SDKS} | {
    client.name: f"`{client.package}`" for client in CLIENTS.values()
}
_COLUMNS = (
    *("Client", "Version", "Speaks", "Task", "Stream cut", "Broken JSON"),
    *("Turns", "Prompt, tokens", "Cached"),
)
_NUMBERS = 3  # the last columns


def table() -> str:
    """Formats the recorded results as a table."""
    rows = {name: _row(name, result) for name, result in load().items()}
    lines = ["---"] * (len(_COLUMNS) - _NUMBERS) + ["---:"] * _NUMBERS
    return "\n".join(
        [_line(_COLUMNS), _line(lines), *(rows[name] for name in _PACKAGES if name in rows)]
    )


def written(page: str) -> str:
    """Returns the page with an updated table.

    Raises:
        ValueError: the page has no markers.
    """
    before, found, rest = page.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not found or not ends:
        raise ValueError(f"{PAGE.name} has no {BEGIN} and {END} behind it")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _row(name: str, result: Result) -> str:
    interface = _INTERFACES.get(name) or CLIENTS[name].interface
    cells = [
        _PACKAGES[name],
        result.version,
        interface,
        *("done" if task in result.did else "–" for task in ("edit", "cut", "broken")),
        str(result.turns or "–"),
        f"{result.first} to {result.last}" if result.turns else "–",
        f"{result.least:.1%}" if result.turns else "–",
    ]
    return _line(cells)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
