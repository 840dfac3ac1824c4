# SPDX-License-Identifier: Apache-2.0
"""Runs a live client in a folder, through a recording proxy."""

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
    """The result of a client's run.

    Attributes:
        status: exit status; None: stopped after `_TIMEOUT_S`.
        printed: its output.
        files: texts of its folder's files by name.
    """

    status: int | None
    printed: str
    files: dict[str, str]


def fill(folder: Path) -> None:
    """Fills a folder with exactly a task's files."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    for name, text in FILES.items():
        (folder / name).write_text(text)


def run(client: Client, task: str, proxy: Proxy, installation: Path, folder: Path) -> Outcome:
    """Makes a client do a task, with its own home and nothing of the user's environment.

    Args:
        client: the client.
        task: name of a task of `agents.tasks`.
        proxy: the proxy it connects to.
        installation: folder of the installed clients.
        folder: its working directory.
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
