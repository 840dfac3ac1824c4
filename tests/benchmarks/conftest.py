# SPDX-License-Identifier: Apache-2.0
"""Lets tests import the benchmarks as the benchmarks import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
