# SPDX-License-Identifier: Apache-2.0
"""The live clients: their pinned packages, and how each is started unattended on loopback."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL, CONTEXT = "script", 131072
#: The folder that `python -m agents.install FOLDER` filled.
FOLDER_VARIABLE = "VLLM_METAL_AGENTS"
NODE = "node@26.10.0"  # pi and Claude Code want 22 or newer
#: What each start is: command line, and variables, of (server's address, home, prompt).
Start = Callable[[str, Path, str], tuple[Sequence[str], Mapping[str, str]]]


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        name: its command.
        package: where it comes from, in npm's index, or in Python's where `python`.
        version: the one that is tried.
        interface: which of the server's it speaks.
        start: how it is asked one thing.
        python: whether it is a Python package, in a virtual environment of its own.
    """

    name: str
    package: str
    version: str
    interface: str
    start: Start
    python: bool = False

    def bin(self, folder: Path) -> Path:
        """Where its command is in an installation."""
        return folder / (f"{self.name}/bin" if self.python else "npm/node_modules/.bin")


def installed() -> Path | None:
    """The folder of the installation, if there is one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def _claude(url: str, home: Path, prompt: str) -> tuple[Sequence[str], Mapping[str, str]]:
    return ["claude", "-p", prompt, "--allowedTools", "Read,Edit,Bash"], {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
        "DISABLE_AUTOUPDATER": "1",
    }


def _codex(url: str, home: Path, prompt: str) -> tuple[Sequence[str], Mapping[str, str]]:
    provider = f'{{name="local",base_url="{url}/v1",wire_api="responses"}}'
    settings = {
        "model_provider": "local",
        "model_providers.local": provider,
        "model_context_window": str(CONTEXT),
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL]
    return ["codex", "exec", *flags, *options, prompt], {}


def _opencode(url: str, home: Path, prompt: str) -> tuple[Sequence[str], Mapping[str, str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"limit": {"context": CONTEXT, "output": 4096}}},
    }
    config = {
        "provider": {"local": provider},
        "model": f"local/{MODEL}",
        "permission": "allow",
        "autoupdate": False,
        "share": "disabled",
    }
    return ["opencode", "run", prompt], {
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def _pi(url: str, home: Path, prompt: str) -> tuple[Sequence[str], Mapping[str, str]]:
    provider = {
        "baseUrl": f"{url}/v1",
        "api": "openai-completions",
        "apiKey": "none",
        "models": [{"id": MODEL, "contextWindow": CONTEXT, "maxTokens": 4096}],
    }
    (home / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
    settings = {"PI_CODING_AGENT_DIR": str(home), "PI_OFFLINE": "1"}
    return ["pi", "-p", "--provider", "local", "--model", MODEL, prompt], settings


def _aider(url: str, home: Path, prompt: str) -> tuple[Sequence[str], Mapping[str, str]]:
    flags = (
        *("--no-git", "--yes-always", "--no-pretty", "--no-show-model-warnings"),
        *("--no-check-update", "--analytics-disable", "--no-show-release-notes"),
    )
    named = ["--model", f"openai/{MODEL}", "--edit-format", "diff", "--message", prompt]
    settings = {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}
    return ["aider", *flags, *named, "notes.txt"], settings


CLIENTS = {
    client.name: client
    for client in (
        Client("claude", "@anthropic-ai/claude-code", "2.1.332", "Messages", _claude),
        Client("codex", "@openai/codex", "0.169.0", "Responses", _codex),
        Client("opencode", "opencode-ai", "1.18.33", "Chat Completions", _opencode),
        Client("pi", "@earendil-works/pi-coding-agent", "1.3.0", "Chat Completions", _pi),
        Client("aider", "aider-chat", "0.86.2", "Chat Completions", _aider, python=True),
    )
}

#: What a server of a script checkpoint is started with.
SERVER_OPTIONS = (
    *("--served-model-name", MODEL),
    *("--max-model-len", str(CONTEXT)),
    *("--max-num-batched-tokens", "2048"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-prompt-tokens-details",
)
