# SPDX-License-Identifier: Apache-2.0
"""Plugin that starts no test after a time limit: ``-p time_limit --begin-within 40``.

On a slow machine a run then ends in time, and reports the skipped tests.
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
    """Skips before fixtures are set up."""
    minutes = item.config.getoption("--begin-within")
    if time.monotonic() - _BEGUN > minutes * 60:
        pytest.skip(f"the {minutes:g} minutes that this run may take to begin tests are over")
