# SPDX-License-Identifier: Apache-2.0
"""Digests the facts that results depend on (code, files, versions, settings) as JSON."""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import json
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import blake3
import torch

#: Packages of the plugin, and suffixes of their code.
PACKAGES = ("vllm_metal", "metal_kernels")
_SOURCES = frozenset((".py", ".metal", ".h"))
#: Folders whose code cannot change what an engine computes, including its K/V on disk: they decide
#: settings, which are separate facts. A new folder counts until it is listed here, and code that
#: counts imports nothing from these (tests/test_structure.py).
NOT_IN_ENGINE = ("vllm_metal/cli", "vllm_metal/platform", "vllm_metal/serving")
#: Folders whose code cannot change a cached response; parsers and limits can.
NOT_IN_ANSWERS = ("vllm_metal/cli",)
_METAL_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAYOUT = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@functools.cache
def sources(left_out: tuple[str, ...]) -> str:
    """Digests the plugin's code without comments and docstrings, as 32 hex digits.

    `left_out` lists folders to exclude, such as NOT_IN_ENGINE.
    """
    # The version alone is not enough: an editable installation keeps its version while code
    # changes.
    dropped = tuple(f"{folder}/" for folder in left_out)
    found = {
        path.relative_to(root.parent).as_posix(): path
        for root in roots()
        for path in root.rglob("*")
        if path.suffix in _SOURCES and path.is_file()
    }
    return _digest(
        (name, _code_of(path).encode())
        for name, path in found.items()
        if not name.startswith(dropped)
    )


def _code_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return _code(text) if path.suffix == ".py" else _METAL_COMMENT.sub("", text)


def _code(text: str) -> str:
    # Drops comments, empty lines, and statements that are only a string (docstrings).
    lines: list[str] = text.splitlines()
    empty: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif token.type == tokenize.NEWLINE:
            if all(each.type == tokenize.STRING for each in statement):
                empty.update(range(statement[0].start[0] - 1, statement[-1].end[0]))
            statement = []
        elif token.type not in _LAYOUT:
            statement.append(token)
        if token.type == tokenize.NL and not lines[row - 1].strip():
            empty.add(row - 1)
    return "\n".join(line for index, line in enumerate(lines) if index not in empty)


def roots() -> list[Path]:
    """Returns the folders of the plugin's packages."""
    return [
        Path(folder)
        for package in PACKAGES
        for folder in (getattr(find_spec(package), "submodule_search_locations", None) or ())
    ]


def of_files(files: Iterable[tuple[Path, Path]]) -> str:
    """Digests (file, root) pairs as 32 hex digits: contents, and names relative to the root.

    The order of files does not matter. Raises OSError if a file cannot be read.
    """
    return _digest((path.relative_to(root).as_posix(), path.read_bytes()) for path, root in files)


def _digest(named: Iterable[tuple[str, bytes]]) -> str:
    hasher = blake3.blake3()
    for name, content in sorted(named):
        hasher.update(f"{name}\0{len(content)}\0".encode())
        hasher.update(content)
    return hasher.hexdigest(length=16)


def versions(*packages: str) -> dict[str, str | None]:
    """Returns the version of each package; None if it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def plain(value: Any, no_fact: Collection[str] = ()) -> Any:
    """Converts a value to JSON data that is the same in every process.

    `no_fact`: names of dataclass fields to leave out.
    """
    if value is None or isinstance(value, str | int | float):
        return value.name if isinstance(value, enum.Enum) else value
    if isinstance(value, Mapping):
        return {str(key): plain(each, no_fact) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, no_fact) for each in value]
    if isinstance(value, set | frozenset):
        # The order of sets changes from process to process.
        return sorted((plain(each, no_fact) for each in value), key=json.dumps)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: plain(getattr(value, field.name, None), no_fact)
            for field in dataclasses.fields(value)
            if field.name not in no_fact
        }
        return {"type": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    # str() could contain a memory address. Classes and functions have names.
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def digest(facts: Mapping[str, Any]) -> str:
    """Returns BLAKE3 of the canonical JSON, as 32 hex digits."""
    text = json.dumps(plain(facts), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return blake3.blake3(text.encode()).hexdigest(length=16)
