# SPDX-License-Identifier: Apache-2.0
"""Parses the header in which a server explains a prefix-cache miss."""

from __future__ import annotations

import re
from urllib.parse import unquote

#: The header is an item with parameters (RFC 9651), written by serving/prefix_misses/header.py. A
#: request with ASKING also gets the texts that differ.
NAME = "prefix-cache-miss"
ASKING = {NAME: "text"}
_PARAMETER = re.compile(
    r";\s*([a-z]+)=(?:%\"(?P<display>[^\"]*)\"|\"(?P<string>(?:[^\"\\]|\\.)*)\"|(?P<number>-?\d+))"
)


def read(header: str | None) -> dict[str, str | int] | None:
    """Returns the cause as `cause`, and the header's parameters by name; None without a header."""
    if not header:
        return None
    found: dict[str, str | int] = {"cause": header.partition(";")[0].strip()}
    for match in _PARAMETER.finditer(header):
        if (number := match["number"]) is not None:
            found[match[1]] = int(number)
        elif (display := match["display"]) is not None:
            found[match[1]] = unquote(display)
        else:
            found[match[1]] = re.sub(r"\\(.)", r"\1", match["string"])
    return found
