# SPDX-License-Identifier: Apache-2.0
"""Provides the models of a test session's runs."""

import pytest
from e2e.fuzz.campaign import Campaign
from e2e.fuzz.models import write_models


@pytest.fixture(scope="session")
def odd_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd-models")
    write_models(folder, odd=True)
    return folder


@pytest.fixture
def campaign(odd_models):
    return Campaign(odd_models)
