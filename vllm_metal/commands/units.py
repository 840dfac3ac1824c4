# SPDX-License-Identifier: Apache-2.0
"""Reads sizes as people write them: 24GB of memory, 32k tokens."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from contextlib import suppress

from vllm_metal.settings import sizes

_MEMORY = {"MB": 2**20, "GB": 2**30, "TB": 2**40}  # Macs are sold by these
_TOKENS = {"": 1, "K": 2**10, "M": 2**20}  # as in "128k context"


def memory(text: str) -> int:
    """Bytes of ``24GB``, ``24 GiB`` or ``24G``; GB are 2**30 bytes, as of a Mac's memory.

    Raises:
        ArgumentTypeError: it is no size.
    """
    return _parse(re.sub(r"(?i)(?<=[mgt])i?b?$", "B", text.strip()), _MEMORY, "24GB")


def tokens(text: str) -> int:
    """Number of ``32768`` or ``32k``; k are 1024.

    Raises:
        ArgumentTypeError: it is no number of tokens.
    """
    return _parse(text, _TOKENS, "32k, or 32768")


def count(text: str) -> int:
    """A whole number of at least 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def share(text: str) -> float:
    """A number above 0 and at most 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    with suppress(ValueError):
        if 0 < (value := float(text)) <= 1:
            return value
    raise ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1, such as 0.92")


def _parse(text: str, units: Mapping[str, int], example: str) -> int:
    try:
        return sizes.parse(text, units, example)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error
