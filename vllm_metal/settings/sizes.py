# SPDX-License-Identifier: Apache-2.0
"""Reads sizes as people write them: 24GB of memory, 50GB of a disk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

#: Disks are sold, and macOS's Finder counts, in powers of 1000; GiB and its kind say 1024.
DISK = {"": 1, "B": 1} | {
    unit: factor**power
    for power, letter in enumerate("KMGT", 1)
    for unit, factor in ((letter, 1000), (f"{letter}B", 1000), (f"{letter}IB", 1024))
}


def parse(text: str, units: Mapping[str, int], example: str) -> int:
    """The number that a text such as `1.5GB` stands for, rounded down.

    Args:
        text: a decimal number and a unit of letters, in either case, with or without a space.
        units: factors by unit in capitals; "" for a number alone.
        example: for the message, of what may be written.

    Raises:
        ValueError: it is no such text, or less than 1.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)", text.strip())
    unit = None if found is None else units.get(found[2].upper())
    if found is None or unit is None or not (size := int(Decimal(found[1]) * unit)):
        raise ValueError(f"{text!r} is not understood; write for example {example}")
    return size


def disk_bytes(value: object) -> int:
    """Bytes of a disk: a whole number, or a text such as "50GB", "50 GiB" or "500MB".

    Raises:
        ValueError: it is neither, or less than 1.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    if isinstance(value, str):
        return parse(value, DISK, '"50GB", "50GiB" or "500MB"')
    raise ValueError(f'must be a number of bytes, or a size such as "50GB", not {value!r}')
