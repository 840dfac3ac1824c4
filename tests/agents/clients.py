# SPDX-License-Identifier: Apache-2.0
"""The live clients: pinned packages, and commands to run each unattended on loopback."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.cli.launch import clients as launch
from vllm_metal.cli.local_server import Endpoint

MODEL, CONTEXT = "script", 131072
#: Folder filled by `python -m agents.install FOLDER`.
FOLDER_VARIABLE = "VLLM_METAL_AGENTS"
_PROMPT = "{prompt}"  # placeholder among a client's arguments
NODE = "node@26.10.0"  # pi and Claude Code require 22 or newer
#: Returns a start's command line and variables for (server address, home, prompt).
Start = Callable[[str, Path, str], tuple[Sequence[str], Mapping[str, str]]]


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        name: its command.
        package: its package on npm, or on PyPI if `python`.
        version: the tested version.
        interface: the server API that it uses.
        start: command to ask it one thing.
        python: whether it is a Python package, in its own virtual environment.
    """

    name: str
    package: str
    version: str
    interface: str
    start: Start
    python: bool = False

    def bin(self, folder: Path) -> Path:
        """Returns the path of its command in an installation."""
        return folder / (f"{self.name}/bin" if self.python else "npm/node_modules/.bin")


def installed() -> Path | None:
    """Returns the installation folder, or None."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def _launched(name: str, arguments: Sequence[str], settings: Mapping[str, str]) -> Start:
    """Starts a client as `vllm-metal launch` does; other settings disable all other connections."""

    def start(url: str, home: Path, prompt: str) -> tuple[Sequence[str], Mapping[str, str]]:
        told = launch.CLIENTS[name].start(Endpoint(url, MODEL, "none", CONTEXT), home)
        for file, text in told.files.items():
            (home / file).write_text(text)
        asked = [prompt if argument == _PROMPT else argument for argument in arguments]
        return [name, *told.arguments, *asked], {**told.environment, **settings}

    return start


def _aider(url: str, home: Path, prompt: str) -> tuple[Sequence[str], Mapping[str, str]]:
    flags = (
        *("--no-git", "--yes-always", "--no-pretty", "--no-show-model-warnings"),
        *("--no-check-update", "--analytics-disable", "--no-show-release-notes"),
    )
    named = ["--model", f"openai/{MODEL}", "--edit-format", "diff", "--message", prompt]
    settings = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
    return ["aider", *flags, *named, "notes.txt"], settings


_CLAUDE = _launched(
    "claude",
    ("-p", _PROMPT, "--allowedTools", "Read,Edit,Bash"),
    {"DISABLE_AUTOUPDATER": "1"},
)
_CODEX = _launched(
    "codex",
    ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", _PROMPT),
    {},
)
_OPENCODE = _launched(
    "opencode",
    ("run", _PROMPT),
    {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_PERMISSION": '{"edit": "allow", "bash": "allow"}',
    },
)
_PI = _launched("pi", ("-p", _PROMPT), {"PI_OFFLINE": "1"})

CLIENTS = {
    client.name: client
    for client in (
        Client("claude", "@anthropic-ai/claude-code", "2.1.332", "Messages", _CLAUDE),
        Client("codex", "@openai/codex", "0.169.0", "Responses", _CODEX),
        Client("opencode", "opencode-ai", "1.18.33", "Chat Completions", _OPENCODE),
        Client("pi", "@earendil-works/pi-coding-agent", "1.3.0", "Chat Completions", _PI),
        Client("aider", "aider-chat", "0.86.2", "Chat Completions", _aider, python=True),
    )
}

#: Options of a server of a script checkpoint. It selects the tool call parser itself.
SERVER_OPTIONS = (
    *("--served-model-name", MODEL),
    *("--max-model-len", str(CONTEXT)),
    *("--max-num-batched-tokens", "2048"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
    "--enable-prompt-tokens-details",
)
