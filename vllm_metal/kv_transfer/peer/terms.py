# SPDX-License-Identifier: Apache-2.0
"""What two engines must have in common before one takes pages from the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Terms:
    """Which K/V an engine has."""

    engine_id: str  # of one run of the engine: another after a restart
    fingerprint: str  # a digest of all that K/V depend on but the text
    facts: Mapping[str, Any]  # what it is a digest of, as JSON has it; for messages to people
    page_bytes: tuple[int, ...]  # of a page, by KV cache group

    @property
    def content(self) -> tuple[str, tuple[int, ...]]:
        """What must be equal."""
        return self.fingerprint, tuple(self.page_bytes)

    @property
    def identity(self) -> tuple[str, str, tuple[int, ...]]:
        """Other than before once the engine is another, or has loaded other weights."""
        return self.engine_id, *self.content
