# SPDX-License-Identifier: Apache-2.0
"""What the interpreter tells of a kernel's lines."""

import sys

import pytest

reads_elf = pytest.mark.skipif(
    sys.platform != "linux", reason="lines of kernels are read from ELF files, which only Linux has"
)
