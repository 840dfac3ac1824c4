# SPDX-License-Identifier: Apache-2.0
"""How a write ended."""

from enum import Enum


class Written(Enum):
    """How a write ended."""

    STORED = "stored"
    PRESENT = "present"  # the disk has it already
    OVER_BUDGET = "over_budget"  # the day's writes are used up
    NO_ROOM = "no_room"  # larger than the limit, or nothing is left to evict
    FAILED = "failed"  # the disk is full or read-only, or failed; writes pause for a minute
