# SPDX-License-Identifier: Apache-2.0
"""Prints lines, tables and a spinner, with rich if it is installed."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError:
    _console = None
else:
    _console = Console(highlight=False, soft_wrap=True)

#: C0 and C1 control characters except tabs and newlines.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def say(text: str, style: str = "") -> None:
    """Prints a line; `style` is a rich style such as ``dim`` or ``bold red``."""
    text = _CONTROLS.sub("", text)
    if _console is None:
        print(text, flush=True)
    else:
        _console.print(Text(text, style=style))


def stream(text: str) -> None:
    """Prints a piece of an answer immediately, without control characters or a newline.

    Otherwise an answer could set the terminal's clipboard or title.
    """
    print(_CONTROLS.sub("", text), end="", flush=True)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows `what` while the block runs, with a spinner on a terminal."""
    if _console is None or not _console.is_terminal:
        print(f"{what} ...", flush=True)
        yield
        return
    with _console.status(f"{what} ..."):
        yield


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; all columns but the first are right-aligned."""
    if _console is not None:
        drawn = Table(*header)
        for column in drawn.columns[1:]:
            column.justify = "right"
        for row in rows:
            drawn.add_row(*row)
        _console.print(drawn)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        first, *rest = (
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *rest]))
