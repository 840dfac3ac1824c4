# SPDX-License-Identifier: Apache-2.0
"""Translates a kernel's Metal text to a C++ translation unit.

Metal is C++ except for address spaces, which the shim defines as empty macros, attributes, which
the compiler ignores, and `threadgroup` variables, which are declared in a function that all threads
of a threadgroup run, but exist once per threadgroup. They become references to memory that the
runtime provides. Line numbers stay the same, so that messages point into the .metal file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .signature import ATTRIBUTES, Signature

_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'   # not code
      |^[ \t]*\#(?:[^\n\\]|\\.)*                                 # nor a preprocessor line
      |[A-Za-z_]\w*|.""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_DECLARATOR = re.compile(r"\s*([A-Za-z_]\w*)\s*((?:\[.*\]\s*)*)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")
_OPEN, _CLOSE = "([{<", ")]}>"
# `float4(` and `vec<T, 4>(`, but not the reference to an array in `float4 (&rows)[2]`.
_NOT_DECLARATOR = r"\((?!\s*[&*]\s*\w+\s*\)\s*\[)"
_NAMED_VECTOR = re.compile(
    r"\b(?:metal::)?(bool|u?char|u?short|u?int|u?long|half|bfloat|float)([234])\s*"
    + _NOT_DECLARATOR
)
_VECTOR = re.compile(r"\b(?:metal::)?vec\s*<([^<>(){};]+)>\s*" + _NOT_DECLARATOR)

#: Maps a threadgroup variable's number, type, name and extents to its replacement.
Declare = Callable[[int, str, str, str], str]


def unit(signature: Signature, header: str, source: str) -> str:
    """Returns a kernel's C++ text and its `metal_cpu_entry`, which the runtime calls per thread."""
    return f'{function(signature, header, source)}#line 1 "entry"\n{_entry(signature)}'


def function(signature: Signature, header: str, source: str) -> str:
    """Returns the C++ text of a kernel's function; a template if it has template arguments."""
    return (
        '#include "mlx_prelude.h"\nusing namespace metal;\n'
        f'{header}\n#line 1 "signature"\n{signature.head}'
        f'#line 1 "{signature.name}"\n{with_variables(source, _in_arena)}\n'
        '#line 1 "signature"\n}\n'
    )


def _entry(signature: Signature) -> str:
    arguments = []
    for p in signature.parameters:
        pointer = p.type.rstrip("*&")
        value = f"({pointer}*)buffers[{p.index}]"
        arguments.append(f"*{value}" if p.type.endswith("&") else value)
    for name in signature.mentions.attributes:
        if ATTRIBUTES[name] == "uint3":
            arguments.append(f"uint3(at.{name}[0], at.{name}[1], at.{name}[2])")
        else:
            arguments.append(f"at.{name}")
    call = f"{signature.function}{signature.arguments}({', '.join(arguments)})"
    return (
        'extern "C" void metal_cpu_entry(void* const* buffers, const metal_cpu::Position& at) {\n'
        f"  {call};\n}}\n"
    )


@dataclass(frozen=True)
class _Statement:
    start: int  # of the word `threadgroup`
    end: int  # of the semicolon
    text: str  # between, without comments


def with_variables(body: str, declare: Declare) -> str:
    """Replaces each threadgroup variable's declaration in a kernel's body by `declare`'s result.

    Line numbers stay the same.
    """
    out, done, count = [], 0, 0
    for statement in _declarations(body):
        variables = _variables(statement.text)
        if not variables:
            continue
        out.append(body[done : statement.start])
        for type, name, extents in variables:
            out.append(declare(count, type, name, extents))
            count += 1
        out.append("\n" * body.count("\n", statement.start, statement.end))
        done = statement.end + 1
    out.append(body[done:])
    return "".join(out)


def with_made_vectors(text: str) -> str:
    """Replaces vector constructors by `metal::detail::make_vec`; clang's vectors have none."""
    text = _NAMED_VECTOR.sub(r"metal::detail::make_vec<\1, \2>(", text)
    return _VECTOR.sub(r"metal::detail::make_vec<\1>(", text)


def _in_arena(number: int, type: str, name: str, extents: str) -> str:
    made = f"metal_cpu_type_{number}"
    return (
        f"typedef {type} {made}{extents}; threadgroup {made}& {name} = *(threadgroup {made}*)"
        f'metal_cpu_threadgroup_memory({number}, "{name}", '
        f"sizeof({made}), sizeof({type}), alignof({made}));"
    )


def _declarations(body: str) -> Iterator[_Statement]:
    """Yields the statements that begin with `threadgroup`."""
    begins, start, text = True, -1, ""
    parentheses = 0
    for match in _TOKEN.finditer(body):
        token = match.group()
        if token.startswith(("//", "/*")) or token.lstrip(" \t").startswith("#"):
            continue
        if start < 0 and begins and token == "threadgroup" and parentheses == 0:
            start, text = match.start(), ""
        elif start >= 0:
            if token == ";":
                yield _Statement(start, match.start(), text)
                start = -1
            else:
                text += " " if token.isspace() else token
        if token.isspace():
            continue
        parentheses += (token == "(") - (token == ")")
        begins = token in (";", "{", "}")


def _variables(text: str) -> list[tuple[str, str, str]]:
    """Returns (type, name, extents) of each declared variable; empty if one is a pointer."""
    parts = _split(text)
    if any(_outside_brackets(part, "*&") for part in parts):
        return []
    if any(_outside_brackets(part, "(=") for part in parts):
        raise ValueError(f"cannot read the declaration: threadgroup {text};")
    head = parts[0]
    end = _extents_start(head)
    words = list(_WORD.finditer(head[:end]))
    name_at = words[-1].start()
    type = head[:name_at].strip()
    declarators = [head[name_at:], *parts[1:]]
    found = []
    for declarator in declarators:
        match = _DECLARATOR.fullmatch(declarator)
        if match is None:
            raise ValueError(f"cannot read the declaration: threadgroup {text};")
        found.append((type, match.group(1), match.group(2).strip()))
    return found


def _extents_start(declaration: str) -> int:
    """Returns the index of the `[...]` at the end of a declaration."""
    end = len(declaration.rstrip())
    while declaration[:end].rstrip().endswith("]"):
        depth = 0
        for i in range(end - 1, -1, -1):
            depth += (declaration[i] == "]") - (declaration[i] == "[")
            if depth == 0:
                end = i
                break
    return end


def _depths(text: str) -> Iterator[tuple[int, str, int]]:
    """Yields each character with the number of brackets open around it."""
    depth = extents = 0
    for i, c in enumerate(text):
        extents += (c == "[") - (c == "]")
        bracket = extents == 0 or c not in "<>"  # a comparison, within an array's extent
        depth -= bracket and c in _CLOSE
        yield i, c, depth
        depth += bracket and c in _OPEN


def _split(text: str) -> list[str]:
    parts, start = [], 0
    for i, c, depth in _depths(text):
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _outside_brackets(text: str, wanted: str) -> bool:
    return any(c in wanted for _, c, depth in _depths(text) if depth == 0)
