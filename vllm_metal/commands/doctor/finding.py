# SPDX-License-Identifier: Apache-2.0
"""What one check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it."""

    name: str  # of the check
    status: Status
    seen: str  # one line
    advice: str = ""  # what the user can do; empty: nothing
    log: tuple[
        str, ...
    ] = ()  # lines that a process printed; the last are shown if the check failed
