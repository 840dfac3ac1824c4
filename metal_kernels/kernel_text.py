# SPDX-License-Identifier: Apache-2.0
"""Shortens the text of kernels: MLX hashes all of it at each dispatch (CustomKernel::eval_gpu).

Comments, indentation and functions that a kernel does not use are left out. Lines keep their
numbers, by `#line`, so that a compiler's messages point into the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMMENT = re.compile(r"//.*")
_WORD = re.compile(r"[A-Za-z_]\w*")
#: The name that a definition brings: of a macro, a struct, a constant, or a function.
_NAMES = re.compile(
    r"^#define (\w+)|\bstruct (\w+)|^constant .*?(\w+) =|^inline .*?(\w+)(?:<[^()]*>)?\(",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Part:
    """A function, struct, constant or macro, with its comments; several without a gap; a body."""

    text: str
    file: str
    line: int  # its first, from 1

    @property
    def names(self) -> set[str]:
        """What others call it; none: it is kept."""
        found = _NAMES.findall(without_comments(self.text))
        return {name for names in found for name in names if name}

    @property
    def words(self) -> set[str]:
        """All that it may use."""
        return set(_WORD.findall(without_comments(self.text)))


def used(functions: Sequence[Part], body: Part) -> str:
    """What a body uses of functions, and what these use, compact.

    Args:
        functions: of files, in order.
        body: of the kernel.
    """
    left = [part for file in functions for part in _definitions(file)]
    order = {part: place for place, part in enumerate(left)}
    words, kept = body.words, list[Part]()
    while found := [part for part in left if not part.names or part.names & words]:
        kept += found
        left = [part for part in left if part not in found]
        words = words.union(*(part.words for part in found))
    return compact(sorted(kept, key=order.__getitem__))


def compact(parts: Sequence[Part]) -> str:
    """The texts without comments and indentation."""
    lines, file, place = list[str](), "", 0
    for part in parts:
        for number, text in enumerate(without_comments(part.text).split("\n"), part.line):
            if not (code := text.strip()):
                continue
            position = f"#line {number}"
            if part.file != file:
                lines.append(f'{position} "{part.file}"')
            elif 0 <= number - place <= len(position):
                lines += [""] * (number - place)
            else:
                lines.append(position)
            lines.append(code)
            file, place = part.file, number + 1
    return "".join(f"{line}\n" for line in lines)


def without_comments(text: str) -> str:
    """As many lines. There are no comments but those to a line's end."""
    return _COMMENT.sub("", text)


def _definitions(file: Part) -> Iterator[Part]:
    """Cut at empty lines that are in no braces."""
    lines, first, depth = file.text.split("\n"), 0, 0
    for number, line in enumerate([*lines, ""]):
        code = without_comments(line)
        depth += code.count("{") - code.count("}")
        if not line.strip() and not depth:
            text = "\n".join(lines[first:number])
            if without_comments(text).strip():
                yield Part(text, file.file, file.line + first)
            first = number + 1
