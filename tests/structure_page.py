# SPDX-License-Identifier: Apache-2.0
"""Writes the list of modules in docs/structure.md from the first lines of their docstrings.

    .venv/bin/python tests/structure_page.py

The floors' headings are kept by hand, lowest first. Under each stand its modules, those that are
imported before those that import them, then by folder and name.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from import_rules import Tree

COMMAND = ".venv/bin/python tests/structure_page.py"
_HEADING = re.compile(r"\*\*([^*]+)\*\* — ")
_LISTED = re.compile(r"- `[^`]+\.py` — ")


def page(tree: Tree) -> str:
    """docs/structure.md as the headings on it and the modules' docstrings have it.

    Raises:
        ValueError: a folder has no heading, or a heading no folder with modules; or a module's
            docstring has no sentence in its first line.
    """
    modules = _by_floor(tree)
    out: list[str] = []
    in_list = False
    for line in (tree.root / "docs" / "structure.md").read_text().splitlines():
        if heading := _HEADING.match(line):
            in_list = True
            out += [line, *(_line(tree, file) for file in ordered(tree, modules[heading[1]])), ""]
            continue
        in_list = in_list and not line.startswith("## ")
        if in_list and (_LISTED.match(line) or (not line and not out[-1])):
            continue
        out.append(line)
    return "\n".join(out) + "\n"


def ordered(tree: Tree, files: list[str]) -> list[str]:
    """Modules of one floor: imported ones before those that import them; then by folder, by name.

    Modules that import each other in a circle follow one another.
    """
    left = {file for file in tree.files if tree.floor_of(file) == tree.floor_of(files[0])}
    below = {
        file: {
            found.imported
            for found in tree.imports
            if found.file == file and found.imported in left and found.when != "call"
        }
        - {file}
        for file in left
    }
    found: list[str] = []
    folder = Path()
    while left:
        file = min(
            left,
            key=lambda file: (len(below[file] & left), Path(file).parent != folder, file),
        )
        left.remove(file)
        found.append(file)
        folder = Path(file).parent
    return [file for file in found if file in files]


def first_line(tree: Tree, file: str) -> str:
    """The first line of a module's docstring, without its full stop.

    Raises:
        ValueError: it is none, or goes on in the second.
    """
    text, _, rest = (ast.get_docstring(tree.parsed(file)) or "").partition("\n")
    if not text.endswith(".") or (rest and not rest.startswith("\n")):
        raise ValueError(f"{file}: its docstring's first line is to be a sentence, and stand alone")
    return text.removesuffix(".")


def _line(tree: Tree, file: str) -> str:
    return f"- `{file}` — {first_line(tree, file)}"


def _by_floor(tree: Tree) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {floor: [] for floor in tree.floors}
    for file in tree.modules():
        floor = tree.floor_of(file)
        if not file.startswith(f"{tree.folder_of(floor)}/"):
            raise ValueError(
                f"{file}: give its folder a heading in docs/structure.md, at its place from below"
            )
        found[floor].append(file)
    if empty := [floor for floor, files in found.items() if not files]:
        raise ValueError(f"no module stands under {', '.join(empty)}: delete the heading")
    return found


if __name__ == "__main__":
    root = Path(__file__).parents[1]
    (root / "docs" / "structure.md").write_text(page(Tree(root)))
