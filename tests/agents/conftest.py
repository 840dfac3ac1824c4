# SPDX-License-Identifier: Apache-2.0
"""A server of the script checkpoint, shared by recordings and library loops."""

import pytest
import scripted
from agents import recordings
from agents.clients import SERVER_OPTIONS
from agents.tasks import scripts
from e2e.server import serve


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    model = scripted.checkpoint(tmp_path_factory.mktemp("scripts"), scripts(recordings.PROJECT))
    with serve(str(model), SERVER_OPTIONS, tmp_path_factory.mktemp("server") / "log") as started:
        yield started
