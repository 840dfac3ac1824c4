# SPDX-License-Identifier: Apache-2.0
"""A plugin that begins no test once its minutes are over: ``-p time_limit --begin-within 40``.

On a slow machine a run then ends in time, and says which part of it was left out.
"""

from __future__ import annotations

import time

import pytest

_BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--begin-within",
        type=float,
        metavar="MINUTES",
        required=True,
        help="tests that have not begun by then are skipped",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips before fixtures are made."""
    minutes = item.config.getoption("--begin-within")
    if time.monotonic() - _BEGUN > minutes * 60:
        pytest.skip(f"the {minutes:g} minutes that this run may take to begin tests are over")
