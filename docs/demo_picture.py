# SPDX-License-Identifier: Apache-2.0
"""Draws docs/demo.svg: the terminal after `make demo`, as the demo printed it on this machine.

    python docs/demo_picture.py

Run it on a machine that does nothing else: the picture shows the times it measures.
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "demo.svg"
WIDTH = 84  # columns; the widest line of the demo has 83
#: rich's colors without its spinner, and no progress bars: both leave nothing on the screen.
QUIET = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "TQDM_DISABLE": "1"}
_CURSOR = re.compile(r"\x1b\[\?\d+[lh]")  # hides and shows it
_WEB_FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # a picture must not ask the network


def run_demo() -> str:
    """What examples/demo.py prints to a terminal.

    Raises:
        subprocess.CalledProcessError: an answer is wrong, or a turn missed the prefix cache.
    """
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return _CURSOR.sub("", done.stdout)


def draw(printed: str) -> str:
    """The picture, as SVG.

    Args:
        printed: with the codes that color a terminal.
    """
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO())
    console.print(Text("$ make demo", style="bold green"))
    console.print(Text.from_ansi(printed.strip("\n")))
    svg = console.export_svg(title="make demo", unique_id="demo")
    return "\n".join(line.rstrip() for line in _WEB_FONTS.sub("", svg).splitlines()) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(run_demo()))
    print(PICTURE)
