# SPDX-License-Identifier: Apache-2.0
"""Checks a .metal file's text for rules of docs/metal-checklist.md that clang does not know.

The rules match text and do not parse C++, so they may reject valid code: a product without spaces
(`a*b`) looks like a pointer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from metal_kernels.kernel import BODY_MARKER

from .signature import ATTRIBUTES

_IGNORED = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|^[ \t]*\#(?:[^\n\\]|\\.)*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_SPACE = r"(?:device|constant|threadgroup|thread)"

# Pattern, and what to say where it matches code.
_FORBIDDEN = (
    (r"\bdouble\b", "Metal has no double"),
    (r"\blong\s+long\b", "Metal has no long long; long has 64 bits"),
    (r"\bif\s+constexpr\b", "'if constexpr' is newer than Metal's C++14; a plain 'if' folds too"),
    (r"\[[\w\s&=,*]*\]\s*(?:\([^()]*\)\s*(?:mutable\s*)?(?:->[^{]*)?)?\{", "Metal has no lambdas"),
    (
        r"\b(?:INFINITY|HUGE_VAL[FH]?|infinity|__builtin_inf\w*)\b",
        "no infinities: they do not survive relaxed math; LOWEST bounds scores",
    ),
    (
        r"\b(?:goto|new|delete|try|catch|throw|virtual|dynamic_cast|typeid|thread_local|asm)\b",
        "Metal has no '{0}'",
    ),
    (r"\bstd::", "Metal has no C++ library"),
    (r"\bauto\s*&?\s*\[", "structured bindings are newer than Metal's C++14"),
    (r"\(\s*\*\s*\w+\s*\)\s*\(", "Metal has no function pointers"),
    (
        r"\b0[xX][0-9a-fA-F]*\.?[0-9a-fA-F]*[pP][+-]?\d",
        "floats in hexadecimal are newer than Metal's C++14; decimals hold powers of two too",
    ),
    (
        r"\b(?:struct|class)\s+\w+\s*(?:<[^{};]*>)?\s*:(?!:)",
        "Metal has no derived classes; copy the members",
    ),
)
# `type*`, as declarations are written (a product has spaces on both sides), and `type (&name)[`.
_POINTER = re.compile(r"[\w>][*&]+(?!=)|[\w>](?=\s+\([*&]\s*\w+\s*\)\s*\[)")
_TYPE_BEFORE = re.compile(r"(?:\b(?!return\b|else\b)[A-Za-z_]\w*|\w>|[\w>][*&])\s+$")
_FUNCTION = re.compile(r"\b([A-Za-z_]\w*)\s*\([^;{}]*\)\s*(?:const\s*)?\{")
_CALL = re.compile(r"\b([A-Za-z_]\w*)\s*(?:<[^;<>]*>)?\s*\(")
_NO_VARIABLES = {"using", "typedef", "template", "struct", "enum"}
_NOT_FUNCTIONS = {"if", "for", "while", "switch", "return", "sizeof"}


@dataclass(frozen=True)
class _Source:
    text: str
    code: str  # comments, literals and preprocessor lines blanked out, of the same length
    body: int  # where the kernel's body begins; the whole text's length without one

    def line(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1


_Found = Iterator[tuple[int, str]]  # where, what


def lint(text: str) -> list[str]:
    """Returns the violations in a .metal file's text, each as "LINE: message", by line."""
    start = text.find(BODY_MARKER)
    source = _Source(
        text,
        _IGNORED.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text),
        len(text) if start < 0 else start + len(BODY_MARKER),
    )
    found = {(source.line(at), what) for rule in _RULES for at, what in rule(source)}
    return [f"{line}: {what}" for line, what in sorted(found)]


def _ascii(source: _Source) -> _Found:
    for match in re.finditer(r"[^\x00-\x7f]", source.text):
        yield match.start(), f"{match.group()!r} is not ASCII; MLX hands the text over as such"


def _forbidden(source: _Source) -> _Found:
    for pattern, what in _FORBIDDEN:
        for match in re.finditer(pattern, source.code):
            before = source.code[: match.start()].rstrip()[-1:]
            if pattern.startswith(r"\[") and (before.isalnum() or before in tuple("_)]>")):
                continue  # an index or an array's extent
            yield match.start(), what.format(match.group())


def _static(source: _Source) -> _Found:
    for match in re.finditer(r"\bstatic\b([^;{(=]*)(.)", source.code):
        words = match.group(1).split()
        if match.group(2) != "(" and not {"const", "constexpr", "constant"} & set(words):
            yield match.start(), "Metal has no static variables that are not constant"


def _mlx_names(source: _Source) -> _Found:
    """Finds misused attribute names: MLX adds a parameter for each occurrence in the body."""
    names = "|".join(sorted(ATTRIBUTES, key=len, reverse=True))
    for match in re.finditer(rf"\w*(?:{names})\w*", source.text[source.body :]):
        at, word = source.body + match.start(), match.group()
        if word not in ATTRIBUTES:
            yield at, f"'{word}' contains the name of an attribute, for which MLX adds a parameter"
        elif not source.code[at : at + len(word)].strip():
            yield at, f"'{word}' in a comment makes MLX add a parameter"
        elif _declares(source.code, at):
            yield at, f"'{word}' is the name of a parameter that MLX adds"
    for match in re.finditer(r"\b\w+_(?:shape|strides|ndim)\b", source.code[source.body :]):
        if _declares(source.code, source.body + match.start()):
            yield (
                source.body + match.start(),
                f"'{match.group()}' may be the name of a parameter that MLX adds",
            )


def _declares(code: str, at: int) -> bool:
    """Whether the name at index `at` follows a type, as in a declaration."""
    return _TYPE_BEFORE.search(code[max(0, at - 80) : at]) is not None


def _program_scope(source: _Source) -> _Found:
    """Finds variables outside of functions that are not `constant`."""
    depth, start = 0, 0
    functions = source.code[: source.body]
    for at, character in enumerate(functions):
        depth += (character in "{(") - (character in "})")
        if depth == 0 and character in ";}":
            statement = functions[start:at].lstrip()
            words = statement.split()
            declares = character == ";" and words and "(" not in statement.split("=")[0]
            if declares and "constant" not in words and words[0] not in _NO_VARIABLES:
                yield at - len(statement), "a variable outside of functions must be 'constant'"
            start = at + 1


def _threadgroup(source: _Source) -> _Found:
    functions = source.code[: source.body]
    for match in re.finditer(r"\bthreadgroup\b([^;(){}*&]*)[;=]", functions):
        yield match.start(), "threadgroup variables are declared in the kernel's body only"


def _address_space(source: _Source) -> _Found:
    for match in _POINTER.finditer(source.code):
        declaration = source.code[_declaration(source.code, match.start()) : match.end()]
        if not re.search(rf"\b(?:{_SPACE}|operator)\b", declaration):
            yield match.start(), "a pointer or reference names no address space"


def _declaration(code: str, at: int) -> int:
    """Returns the start of the declaration whose type ends at index `at`."""
    depth = 0
    for start in range(at, -1, -1):
        closes = code[start] == ">" and code[start - 1] != "-"
        depth += closes - (code[start] == "<")
        if depth < 0 or (depth == 0 and code[start] in ";{}(,="):
            return start + 1
    return 0


def _recursion(source: _Source) -> _Found:
    """Finds functions that call themselves, directly or indirectly; ignores overloads."""
    calls: dict[str, set[str]] = {}
    places: dict[str, int] = {}
    for match in _FUNCTION.finditer(source.code[: source.body]):
        name = match.group(1)
        if name in _NOT_FUNCTIONS:
            continue
        end = _closing(source.code, match.end())
        inside = _CALL.findall(source.code[match.end() : end])
        calls.setdefault(name, set()).update(inside)
        places.setdefault(name, match.start())
    for name, place in places.items():
        reached: set[str] = set()
        todo = [name]
        while todo:
            for other in calls.get(todo.pop(), set()) - reached:
                reached.add(other)
                todo.append(other)
        if name in reached:
            yield place, f"'{name}' calls itself; Metal has no recursion"


def _closing(code: str, start: int) -> int:
    """Returns the index of the brace that closes the one opened before `start`."""
    depth = 1
    for at in range(start, len(code)):
        depth += (code[at] == "{") - (code[at] == "}")
        if depth == 0:
            return at
    return len(code)


_RULES: tuple[Callable[[_Source], _Found], ...] = (
    _ascii,
    _forbidden,
    _static,
    _mlx_names,
    _program_scope,
    _threadgroup,
    _address_space,
    _recursion,
)
