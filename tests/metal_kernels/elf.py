# SPDX-License-Identifier: Apache-2.0
"""Reads a kernel's lines from the interpreter."""

import sys

import pytest

reads_elf = pytest.mark.skipif(
    sys.platform != "linux", reason="lines of kernels are read from ELF files, which only Linux has"
)
