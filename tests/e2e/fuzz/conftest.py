# SPDX-License-Identifier: Apache-2.0
"""The models of a session's runs."""

import pytest
from e2e.fuzz.campaign import Campaign


@pytest.fixture
def campaign(tiny_models):
    return Campaign(tiny_models)
