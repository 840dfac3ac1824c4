# SPDX-License-Identifier: Apache-2.0
"""Installs the pinned clients: `python -m agents.install FOLDER`, from `tests/`, with a network.

It takes 2 GB, npm, and for aider a Python that aider has wheels for (3.10 to 3.12).
"""

import subprocess
import sys
import venv
from pathlib import Path

from agents.clients import CLIENTS, NODE


def install(folder: Path) -> None:
    """Installs the clients into `folder`.

    Raises:
        subprocess.CalledProcessError: npm or pip failed and has printed the reason.
    """
    npm = folder / "npm"
    npm.mkdir(parents=True, exist_ok=True)
    packages = [NODE, *(f"{c.package}@{c.version}" for c in CLIENTS.values() if not c.python)]
    for command in (
        ["npm", "init", "-y"],
        ["npm", "install", "--no-fund", "--no-audit", *packages],
        ["npm", "install-scripts", "approve", "--all"],  # newer npm runs none by default
        ["npm", "rebuild"],
    ):
        subprocess.run(command, cwd=npm, check=command[1] != "install-scripts")
    for client in CLIENTS.values():
        if client.python:
            venv.create(folder / client.name, with_pip=True)
            pip = folder / client.name / "bin" / "pip"
            subprocess.run([pip, "install", f"{client.package}=={client.version}"], check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute())
