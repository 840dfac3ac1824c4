# SPDX-License-Identifier: Apache-2.0
"""Puts what live clients left into the tree: `python -m agents.keep FOLDER`, from `tests/`."""

import shutil
import sys
from pathlib import Path

from agents import page, recordings, results


def keep(folder: Path) -> None:
    """Copies results and recordings of an installation, and writes the table of docs/agents.md."""
    shutil.copy(folder / "results.json", results.FILE)
    for path in (folder / "recordings").iterdir():
        shutil.copy(path, recordings.FOLDER)
    page.PAGE.write_text(page.written(page.PAGE.read_text()))


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
