# SPDX-License-Identifier: Apache-2.0
"""Provides the sampling distributions that samplers must follow, as fixtures."""

from collections.abc import Callable

import numpy as np
import pytest
from engine.sample import law

Distribution = Callable[..., np.ndarray]


@pytest.fixture(scope="session")
def assert_follows() -> Callable[[np.ndarray, np.ndarray], None]:
    return law.assert_follows


@pytest.fixture(scope="session")
def distribution() -> Distribution:
    return law.distribution


@pytest.fixture(scope="session")
def softmax() -> Callable[[np.ndarray], np.ndarray]:
    return law.softmax
