# SPDX-License-Identifier: Apache-2.0
"""A fixture that disables MLX's compilation in tests of models' results."""

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def unfused() -> Iterator[None]:
    """Makes MLX run each operation separately.

    Its CPU backend runs g++ for each fused kernel, a second for each of some 30 in
    a new family. `test_compiled.py` tests graphs with fused operations.
    """
    mx.disable_compile()
    yield
    mx.enable_compile()
