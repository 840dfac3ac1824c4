# SPDX-License-Identifier: Apache-2.0
"""Copies results of live clients into the tree: `python -m agents.keep FOLDER`, from `tests/`."""

import shutil
import sys
from pathlib import Path

from agents import page, recordings, results


def keep(folder: Path) -> None:
    """Copies an installation's results and recordings, and updates the table of docs/agents.md."""
    shutil.copy(folder / "results.json", results.FILE)
    for path in (folder / "recordings").iterdir():
        shutil.copy(path, recordings.FOLDER)
    page.PAGE.write_text(page.written(page.PAGE.read_text()))


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
