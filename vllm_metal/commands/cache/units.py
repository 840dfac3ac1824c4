# SPDX-License-Identifier: Apache-2.0
"""Reads ages and fingerprints as people write them."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def age(text: str) -> float:
    """Seconds of ``30d``, ``12h``, ``45m`` or ``2w``.

    Raises:
        ArgumentTypeError: it is no age.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([mhdw])", text.strip())
    if found is None:
        raise ArgumentTypeError(f"{text!r} is not understood; write for example 30d, 12h or 45m")
    return float(found[1]) * _SECONDS[found[2]]


def fingerprint(text: str) -> str:
    """A fingerprint, or how it begins.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not re.fullmatch(r"[0-9a-f]+", text):
        raise ArgumentTypeError(f"{text!r} is no fingerprint; `vllm-metal cache ls` shows them")
    return text
