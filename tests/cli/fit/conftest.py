# SPDX-License-Identifier: Apache-2.0
"""Provides the tests' models."""

import pytest
from cli.fit.models import write


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Returns a model's folder by name, written once."""
    written = {}
    root = tmp_path_factory.mktemp("models")

    def of(name):
        if name not in written:
            written[name] = write(root / str(len(written)), name)
        return written[name]

    return of
