# SPDX-License-Identifier: Apache-2.0
"""Where the models of the tests lie."""

import pytest
from cli.fit.models import write


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Gives a model's folder by name, written once."""
    written = {}
    root = tmp_path_factory.mktemp("models")

    def of(name):
        if name not in written:
            written[name] = write(root / str(len(written)), name)
        return written[name]

    return of
