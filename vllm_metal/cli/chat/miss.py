# SPDX-License-Identifier: Apache-2.0
"""Reads the header in which a server says why a prompt's prefix was missed.

It is an item with parameters (RFC 9651); serving/prefix_misses/header.py writes it.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

#: A request that carries it is told the texts that differ, too.
NAME = "prefix-cache-miss"
ASKING = {NAME: "text"}
_PARAMETER = re.compile(
    r";\s*([a-z]+)=(?:%\"(?P<display>[^\"]*)\"|\"(?P<string>(?:[^\"\\]|\\.)*)\"|(?P<number>-?\d+))"
)


def read(header: str | None) -> dict[str, str | int] | None:
    """The cause, as `cause`, and the header's parameters by name; None where there is none."""
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
