# SPDX-License-Identifier: Apache-2.0
"""Parses option values as people write them: 24GB of memory, 32k tokens, ages, fingerprints.

Parsers reject a value with an ArgumentTypeError that says what to write.
"""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from contextlib import suppress
from math import inf

from vllm_metal.settings import values

_MEMORY = {"MB": 2**20, "GB": 2**30, "TB": 2**40}  # powers of 1024, as Apple specifies memory
_TOKENS = {"": 1, "K": 2**10, "M": 2**20}  # as in "128k context"

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def counted(number: int, name: str) -> str:
    """Formats a count, as in "1 block" and "2 blocks"."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def memory(text: str) -> int:
    """Parses bytes: ``24GB``, ``24 GiB`` or ``24G``; GB are 2**30 bytes, as for a Mac's memory."""
    return _parse(re.sub(r"(?i)(?<=[mgt])i?b?$", "B", text.strip()), _MEMORY, "24GB")


def tokens(text: str) -> int:
    """Parses a token count: ``32768`` or ``32k``; k is 1024."""
    return _parse(text, _TOKENS, "32k, or 32768")


def count(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive(text: str) -> float:
    """Parses a number above 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < inf:
            return value
    raise ArgumentTypeError(f"{text!r} is not a number above 0")


def at_least_0(text: str) -> float:
    """Parses a number of at least 0."""
    with suppress(ValueError):
        if 0 <= (value := float(text)) < inf:
            return value
    raise ArgumentTypeError(f"{text!r} is not a number of at least 0")


def port(text: str) -> int:
    """Parses a port number, from 1 to 65535."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise ArgumentTypeError(f"{text!r} is not a port: a number from 1 to 65535")
    return int(text)


def share(text: str) -> float:
    """Parses a number above 0 and at most 1."""
    with suppress(ValueError):
        if 0 < (value := float(text)) <= 1:
            return value
    raise ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1, such as 0.92")


def age(text: str) -> float:
    """Parses seconds: ``30d``, ``12h``, ``45m`` or ``2w``."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([mhdw])", text.strip())
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not understood; write for example 30d, 12h or 45m")
    return float(match[1]) * _SECONDS[match[2]]


def fingerprint(text: str) -> str:
    """Parses a fingerprint, or a prefix of one."""
    if not re.fullmatch(r"[0-9a-f]+", text):
        raise ArgumentTypeError(f"{text!r} is not a fingerprint; `vllm-metal cache ls` shows them")
    return text


def _parse(text: str, units: Mapping[str, int], example: str) -> int:
    try:
        return values.parse_size(text, units, example)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
