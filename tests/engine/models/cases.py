# SPDX-License-Identifier: Apache-2.0
"""Assigns a table's cases to test commands."""

from collections.abc import Iterable
from typing import Any

import pytest


def cases(names: Iterable[Any], quick: Iterable[Any] = (), more: Iterable[Any] = ()) -> list[Any]:
    """Returns test parameters: `quick` without a marker, `more`, and all others `slow`."""
    names, quick, more = list(names), set(quick), set(more)
    assert quick | more <= set(names)
    return [
        name
        if name in quick
        else pytest.param(name, marks=pytest.mark.more if name in more else pytest.mark.slow)
        for name in names
    ]
