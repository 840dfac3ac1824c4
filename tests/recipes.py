# SPDX-License-Identifier: Apache-2.0
"""Reads CONTRIBUTING.md's recipes: which files each names, and which files mention an example.

A recipe is a section `### Recipe: a kernel` with a numbered list, whose items name files and
folders in backticks. A name without a folder lies beside the file, or in the folder, that the item
named before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

#: Where texts are that a change may have to touch, and how their names end.
PLACES = (
    ".github",
    "benchmarks",
    "docs",
    "examples",
    "interpreter",
    "metal_kernels",
    "requirements",
    "scripts",
    "tests",
    "vllm_metal",
)
ENDINGS = {".h", ".in", ".md", ".metal", ".py", ".sh", ".toml", ".txt", ".yml"}


def recipes(text: str) -> dict[str, str]:
    """The sections by what they are recipes for; "" is what stands before the first."""
    body = text.partition("\n## Recipes\n")[2].partition("\n## ")[0]
    first, *sections = re.split(r"^### ", body, flags=re.MULTILINE)
    found = {"": first} if body else {}
    for section in sections:
        heading, _, rest = section.partition("\n")
        if heading.startswith("Recipe: "):
            found[heading.removeprefix("Recipe: ")] = rest
    return found


def items(recipe: str) -> list[str]:
    """The points of a recipe's numbered list, or the whole text where there is none."""
    return re.split(r"^\d+\. ", recipe, flags=re.MULTILINE)[1:] or [recipe]


def named(recipe: str, root: Path) -> tuple[set[str], set[str]]:
    """What a recipe names: (files and folders that exist, names of which nothing exists).

    Folders end in "/".
    """
    exist, missing = set(), set()
    for item in items(recipe):
        beside = root
        for name in re.findall(r"`([^`\s]+)`", item):
            if not (name.endswith("/") or Path(name).suffix in ENDINGS):
                continue  # a command, or a name in the code
            path = root / name if "/" in name or not (beside / name).exists() else beside / name
            if path.is_dir() or path.is_file():
                exist.add(str(path.relative_to(root)) + "/" * path.is_dir())
            else:
                missing.add(name)
            beside = path if path.is_dir() else path.parent
    return exist, missing


def covers(names: set[str], file: str) -> bool:
    """Whether names of files and folders include a file."""
    return any(file == name or (name.endswith("/") and file.startswith(name)) for name in names)


def texts(root: Path) -> Iterator[str]:
    """Every file that a change may have to touch, from the root on."""
    yield from (path.name for path in root.iterdir() if path.suffix in ENDINGS and path.is_file())
    for place in PLACES:
        for path in (root / place).rglob("*"):
            if path.suffix in ENDINGS and path.is_file():
                yield str(path.relative_to(root))


def mentioning(pattern: str, root: Path) -> set[str]:
    """Files whose text, or whose path, a regular expression matches."""
    return {
        file
        for file in texts(root)
        if re.search(pattern, file) or re.search(pattern, (root / file).read_text(errors="ignore"))
    }
