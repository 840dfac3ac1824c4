# SPDX-License-Identifier: Apache-2.0
"""A fixture that takes a compiler out of tests of what models compute."""

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def unfused() -> Iterator[None]:
    """MLX runs each operation by itself.

    Its CPU backend runs g++ for each kernel of several operations, a second for each of some 30 in
    a new family. `test_compiled.py` is of graphs whose operations are fused.
    """
    mx.disable_compile()
    yield
    mx.enable_compile()
