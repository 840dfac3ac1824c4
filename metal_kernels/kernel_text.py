# SPDX-License-Identifier: Apache-2.0
"""Shortens the text of kernels, since MLX hashes all of it per dispatch (CustomKernel::eval_gpu).

Drops comments, indentation and unused functions. `#line` keeps line numbers, so that compiler
messages point into the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMMENT = re.compile(r"//.*")
_WORD = re.compile(r"[A-Za-z_]\w*")
#: The name that a definition introduces: a macro, struct, constant or function.
_NAMES = re.compile(
    r"^#define (\w+)|\bstruct (\w+)|^constant .*?(\w+) =|^inline .*?(\w+)(?:<[^()]*>)?\(",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Part:
    """A piece of kernel source: a file, definitions without empty lines between, or a body."""

    text: str
    file: str
    line: int  # first line, from 1

    @property
    def names(self) -> set[str]:
        """Names that the part defines; empty: the part is always kept."""
        found = _NAMES.findall(without_comments(self.text))
        return {name for names in found for name in names if name}

    @property
    def words(self) -> set[str]:
        """All words in the code, which include every name that it uses."""
        return set(_WORD.findall(without_comments(self.text)))


def used(functions: Sequence[Part], body: Part) -> str:
    """Returns the definitions that a kernel body uses, directly or indirectly, in compact form."""
    left = [part for file in functions for part in _definitions(file)]
    order = {part: index for index, part in enumerate(left)}
    words, kept = body.words, list[Part]()
    while found := [part for part in left if not part.names or part.names & words]:
        kept += found
        left = [part for part in left if part not in found]
        words = words.union(*(part.words for part in found))
    return compact(sorted(kept, key=order.__getitem__))


def compact(parts: Sequence[Part]) -> str:
    """Joins the parts' source without comments and indentation."""
    lines, file, next_line = list[str](), "", 0
    for part in parts:
        for number, text in enumerate(without_comments(part.text).split("\n"), part.line):
            if not (code := text.strip()):
                continue
            directive = f"#line {number}"
            if part.file != file:
                lines.append(f'{directive} "{part.file}"')
            # For small gaps, empty lines are shorter than a directive.
            elif 0 <= number - next_line <= len(directive):
                lines += [""] * (number - next_line)
            else:
                lines.append(directive)
            lines.append(code)
            file, next_line = part.file, number + 1
    return "".join(f"{line}\n" for line in lines)


def without_comments(text: str) -> str:
    """Removes comments, all of which extend to a line's end; keeps the number of lines."""
    return _COMMENT.sub("", text)


def _definitions(file: Part) -> Iterator[Part]:
    """Splits a file into definitions, at empty lines outside braces."""
    lines, first, depth = file.text.split("\n"), 0, 0
    for number, line in enumerate([*lines, ""]):
        code = without_comments(line)
        depth += code.count("{") - code.count("}")
        if not line.strip() and not depth:
            text = "\n".join(lines[first:number])
            if without_comments(text).strip():
                yield Part(text, file.file, file.line + first)
            first = number + 1
