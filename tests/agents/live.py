# SPDX-License-Identifier: Apache-2.0
"""A live client at work in a folder, before a recording proxy."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from agents.clients import Client
from agents.proxy import Proxy
from agents.tasks import FILES, marker

_TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Outcome:
    """A client that ended.

    Attributes:
        status: its exit status; None: it was stopped after `_TIMEOUT_S`.
        printed: what it printed.
        files: text by name of the files in its folder.
    """

    status: int | None
    printed: str
    files: dict[str, str]


def fill(folder: Path) -> None:
    """Puts a task's files into a folder, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    for name, text in FILES.items():
        (folder / name).write_text(text)


def run(client: Client, task: str, proxy: Proxy, installation: Path, folder: Path) -> Outcome:
    """Has a client do a task, with a home of its own and nothing of the user's environment.

    Args:
        client: which.
        task: of `agents.tasks`.
        proxy: what it talks to.
        installation: where the clients are.
        folder: where it works.
    """
    home = folder.parent / f"home-{client.name}-{task}"
    home.mkdir(exist_ok=True)
    fill(folder)
    command, settings = client.start(proxy.url, home, f"Do the task {marker(client.name, task)}.")
    paths = [client.bin(installation), installation / "npm/node_modules/.bin", os.environ["PATH"]]
    environment = {"PATH": os.pathsep.join(map(str, paths)), "HOME": str(home), "TERM": "dumb"}
    program = client.bin(installation) / command[0]
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            env=environment | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
        )
        status, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        status, printed = None, (late.stdout or b"").decode(errors="replace")
    files = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    return Outcome(status, printed, files)
