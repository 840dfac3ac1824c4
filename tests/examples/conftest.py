# SPDX-License-Identifier: Apache-2.0
"""Makes the examples importable, as they import each other."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "disaggregated"), str(EXAMPLES / "cluster")]
