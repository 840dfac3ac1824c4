# SPDX-License-Identifier: Apache-2.0
"""Lets tests import the examples as the examples import each other."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
