# SPDX-License-Identifier: Apache-2.0
"""Parses JSON objects of settings, one reader per key.

Sizes and numbers are accepted as people write them: 24GB of memory, 50GB of a disk. A reader
rejects a value with a ValueError whose text continues after the key's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

#: Lifts the daily limit on writes. 0 is rejected because it could mean no limit or no writes.
UNLIMITED: Literal["unlimited"] = "unlimited"

#: Powers of 1000, as disks are sold and macOS's Finder counts; GiB and the like are powers of 1024.
_DISK = {"": 1, "B": 1} | {
    unit: factor**power
    for power, letter in enumerate("KMGT", 1)
    for unit, factor in ((letter, 1000), (f"{letter}B", 1000), (f"{letter}IB", 1024))
}
_TIMES = {"S": 1, "M": 60, "MIN": 60, "H": 3600, "D": 24 * 3600}
#: Converts a key's value to what the plugin uses.
Reader = Callable[[Any], Any]


def read(given: Mapping[str, Any], readers: Mapping[str, Reader], where: str) -> dict[str, Any]:
    """Applies each key's reader; raises ValueError, naming the option `where`, for invalid keys."""
    return {key: _read_one(key, value, readers, where) for key, value in given.items()}


def _read_one(key: str, value: Any, readers: Mapping[str, Reader], where: str) -> Any:
    if key not in readers:
        meant = did_you_mean(str(key), map(repr, readers))
        raise ValueError(f"{where} has no key {key!r} (known: {known(readers)}){meant}")
    try:
        return readers[key](value)
    except ValueError as error:
        raise ValueError(f"{where} {key!r} {error}") from error


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Returns a "did you mean" suffix with the most similar name; "" if none is similar."""
    close = get_close_matches(given, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def known(readers: Mapping[str, Reader]) -> str:
    """Lists the readers' keys, for messages."""
    return ", ".join(map(repr, readers))


def flag(value: Any) -> bool:
    """Reads a Boolean."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {value!r}")
    return value


def path(value: Any) -> Path:
    """Reads a path and makes it absolute; `~` is expanded."""
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise ValueError(f"must be a path, not {value!r}")
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"must be a path, not {value!r}: {error}") from error


def positive(value: Any, of: str) -> float:
    """Reads a finite number above 0; the error message says "a number of `of`"."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"must be a number of {of}, not {value!r}")
    return float(value)


def count(value: Any, most: int | None = None) -> int:
    """Reads a whole number above 0, and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"must be a whole number above 0, not {value!r}")
    if most is not None and value > most:
        raise ValueError(f"must be at most {most}, not {value!r}")
    return value


def parse_size(text: str, units: Mapping[str, int], example: str) -> int:
    """Parses a number with a unit, such as `1.5GB`, rounding down.

    `units` maps units in capitals to factors ("" is a bare number); `example` lists valid texts.
    Raises ValueError for another format, or a result below 1.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    unit = None if match is None else units.get(match[2].upper())
    if match is None or unit is None or not (size := int(Decimal(match[1]) * unit)):
        raise ValueError(f"{text!r} is not understood; write for example {example}")
    return size


def size(value: Any) -> int:
    """Reads bytes on disk: a whole number, or a text such as "50GB", "50 GiB" or "500MB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if not isinstance(value, str):
        raise ValueError(f'must be a number of bytes, or a size such as "50GB", not {value!r}')
    try:
        return parse_size(value, _DISK, '"50GB", "50GiB" or "500MB"')
    except ValueError as error:
        raise ValueError(f"is not a size: {error}") from error


def duration(value: Any) -> float:
    """Reads seconds: a number above 0, or a text such as "90s", "10m" or "1.5h"."""
    if not isinstance(value, str):
        return positive(value, 'seconds, or a time such as "10m"')
    try:
        return float(parse_size(value, _TIMES, '"90s", "10m" or "2h"'))
    except ValueError as error:
        raise ValueError(f"is not a time: {error}") from error


def daily_size(value: Any) -> int | Literal["unlimited"]:
    """Reads how many bytes may be written to disk per day, or "unlimited"."""
    if value == UNLIMITED:
        return UNLIMITED
    try:
        return size(value)
    except ValueError as error:
        raise ValueError(f'{error}; "{UNLIMITED}" lifts the limit') from error
