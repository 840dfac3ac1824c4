# SPDX-License-Identifier: Apache-2.0
"""The table of docs/speculation.md: the registry's methods.

`python -m engine.spec_decode.page` from tests/ renews it there.
"""

from pathlib import Path

from vllm_metal.engine.spec_decode.registry import METHODS

PAGE = Path(__file__).parents[3] / "docs" / "speculation.md"


def methods_table() -> str:
    """Returns the methods as a Markdown table for users."""
    lines = ["| `method` | drafts come from | needs |", "| --- | --- | --- |"]
    for method in METHODS:
        names = ", ".join(f"`{name}`" for name in method.names)
        note = "" if method.schedules_ahead else " (turns off async scheduling)"
        lines.append(f"| {names} | {method.drafts_come_from}{note} | {method.needs} |")
    return "\n".join(lines)


#: Lines of the page around the table.
BEGIN, END = "<!-- methods: begin -->", "<!-- methods: end -->"


def renew_table(page: str) -> str:
    """Returns the page with the current table between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no lines {BEGIN} and {END}, between which the table goes")
    return f"{before}{begin}\n{methods_table()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(renew_table(PAGE.read_text()))
