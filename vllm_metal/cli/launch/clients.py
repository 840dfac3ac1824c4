# SPDX-License-Identifier: Apache-2.0
"""Lists the agents that can be launched (CLIENTS), and configures each for a server.

Agents get only environment variables, arguments and temporary files, so that the user's own
configuration stays unchanged. Each function links the documentation of the settings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_metal.cli.local_server import Endpoint

#: Variable with the server's key, for clients that are configured with a variable's name.
KEY = "VLLM_METAL_LAUNCH_KEY"
PROVIDER = "vllm-metal"  # the server's name in a client's list of providers


@dataclass(frozen=True)
class Start:
    """Arguments, variables and files to start a client with."""

    arguments: tuple[str, ...] = ()  # before the user's own
    environment: Mapping[str, str] = field(default_factory=dict)  # variables to set
    without: Sequence[str] = ()  # the user's variables to unset: they would select another server
    files: Mapping[str, str] = field(default_factory=dict)  # texts of temporary files by name


@dataclass(frozen=True)
class Client:
    """A coding agent that can be launched."""

    executable: str
    install: str  # a command that installs it
    start: Callable[[Endpoint, Path], Start]  # takes a server and a folder for temporary files


def _claude(server: Endpoint, folder: Path) -> Start:
    """Configures Claude Code: https://code.claude.com/docs/en/env-vars."""
    sizes = (f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *sizes)
    return Start(
        environment=dict.fromkeys(models, server.model)
        | {
            "ANTHROPIC_BASE_URL": server.root,
            "ANTHROPIC_AUTH_TOKEN": server.key,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.output),
            # A changing line at the start of the prompt, which would prevent prefix-cache hits.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        without=("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    )


def _codex(server: Endpoint, folder: Path) -> Start:
    """Configures Codex, for Responses only: https://developers.openai.com/codex/config-reference."""
    provider = f"model_providers.{PROVIDER}"
    settings = {
        "model": server.model,
        "model_provider": PROVIDER,
        "model_context_window": server.context,
        f"{provider}.name": PROVIDER,
        f"{provider}.base_url": f"{server.root}/v1",
        f"{provider}.env_key": KEY,
        f"{provider}.wire_api": "responses",
    }
    # Values are TOML, whose strings and numbers are JSON's.
    given = (("-c", f"{name}={json.dumps(value)}") for name, value in settings.items())
    return Start(tuple(part for pair in given for part in pair), {KEY: server.key})


def _opencode(server: Endpoint, folder: Path) -> Start:
    """Configures opencode, which merges this last: https://opencode.ai/docs/config."""
    limit = {"context": server.context, "output": server.output}
    name = f"{PROVIDER}/{server.model}"
    config = {
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {"baseURL": f"{server.root}/v1", "apiKey": f"{{env:{KEY}}}"},
                "models": {server.model: {"name": server.model, "limit": limit}},
            }
        },
        "model": name,
        "small_model": name,
    }
    return Start(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY: server.key})


def _pi(server: Endpoint, folder: Path) -> Start:
    """Configures pi: docs/custom-provider.md, docs/cli.md of @earendil-works/pi-coding-agent."""
    provider = {
        "name": PROVIDER,
        "baseUrl": f"{server.root}/v1",
        "apiKey": f"${KEY}",
        "api": "openai-completions",
        "models": [
            {
                "type": "chat",
                "id": server.model,
                "name": server.model,
                "reasoning": False,
                "input": ["text"],
                "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
                "contextWindow": server.context,
                "maxTokens": server.output,
            }
        ],
    }
    extension = (
        "export default function (pi) {\n"
        f"  pi.registerProvider({json.dumps(PROVIDER)}, {json.dumps(provider)});\n"
        "}\n"
    )
    name = "vllm-metal.js"
    return Start(
        ("--extension", str(folder / name), "--provider", PROVIDER, "--model", server.model),
        {KEY: server.key},
        files={name: extension},
    )


CLIENTS: Mapping[str, Client] = {
    "claude": Client("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("codex", "npm install -g @openai/codex", _codex),
    "opencode": Client("opencode", "npm install -g opencode-ai", _opencode),
    "pi": Client("pi", "npm install -g @earendil-works/pi-coding-agent", _pi),
}
