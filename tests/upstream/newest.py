# SPDX-License-Identifier: Apache-2.0
"""Extracts the newest vLLM's sources for Python's path: ``python -m upstream.newest FOLDER``."""

import argparse
import sys
from pathlib import Path

from upstream import archive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        archive.newest(parser.parse_args().folder)
    except archive.UnavailableError as error:
        print(f"newest vLLM: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
