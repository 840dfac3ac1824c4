# SPDX-License-Identifier: Apache-2.0
"""Reads JSON objects of settings: each key by its reader, mistakes named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from vllm_metal.settings import sizes

#: The daily budget of writes that is none. 0 is refused, as it could be taken for either.
UNLIMITED: Literal["unlimited"] = "unlimited"

#: Turns the value of a key into what the plugin uses; a ValueError goes on after the key's name.
Reader = Callable[[Any], Any]


def read(given: Mapping[str, Any], readers: Mapping[str, Reader], where: str) -> dict[str, Any]:
    """Every value, read.

    Args:
        given: what the user wrote.
        readers: by key.
        where: the option, for messages.

    Raises:
        ValueError: a key has no reader, or its reader refuses the value.
    """
    return {key: _read_one(key, value, readers, where) for key, value in given.items()}


def _read_one(key: str, value: Any, readers: Mapping[str, Reader], where: str) -> Any:
    if key not in readers:
        close = get_close_matches(str(key), readers, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{where} has no key {key!r} (known: {known(readers)}){meant}")
    try:
        return readers[key](value)
    except ValueError as error:
        raise ValueError(f"{where} {key!r} {error}") from error


def known(readers: Mapping[str, Reader]) -> str:
    """The keys, for messages."""
    return ", ".join(map(repr, readers))


def flag(value: Any) -> bool:
    """A Boolean.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def path(value: Any) -> Path:
    """An absolute path; `~` stands for the user's home.

    Raises:
        ValueError: it is no text, empty, or names a user that does not exist.
    """
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"must be a path, not {value!r}")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"must be a path, not {value!r}: {error}") from error


def size(value: Any) -> int:
    """Bytes of a disk, as `sizes.disk_bytes` reads them.

    Raises:
        ValueError: it is no size.
    """
    try:
        return sizes.disk_bytes(value)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("must") else f"is no size: {text}") from error


def daily_size(value: Any) -> int | Literal["unlimited"]:
    """The same, or "unlimited".

    Raises:
        ValueError: it is neither.
    """
    if value == UNLIMITED:
        return UNLIMITED
    try:
        return size(value)
    except ValueError as error:
        raise ValueError(f'{error}; "{UNLIMITED}" lifts the limit') from error
