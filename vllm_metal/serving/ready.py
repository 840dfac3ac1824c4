# SPDX-License-Identifier: Apache-2.0
"""Prints a server's address and a first request once the server is ready."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from vllm_metal.settings import envs
from vllm_metal.settings.address import is_loopback_ip

_POLL_S = 0.1
#: Bodies of suggested requests by route.
_BODIES: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "Hello"},
    "completions": {"prompt": "Once upon a time", "max_tokens": 32},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}
_tasks: set[asyncio.Task[None]] = set()  # event loops keep only weak references to tasks


def around(app: Any, state: Any) -> Any:
    """Makes a server print its address once it has started; returns `app` unchanged."""
    task = asyncio.get_running_loop().create_task(_announce(state))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return app


async def _announce(state: Any) -> None:
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(_POLL_S)
    config = state.vllm_config.model_config
    chats = bool(getattr(state.engine_client.tokenizer, "chat_template", None))
    route = "embeddings"
    if config.runner_type != "pooling":
        route = "chat/completions" if chats else "completions"
    printed = lines(address(state.args), config.served_model_name, config.max_model_len, route)
    if is_open(state.args):
        printed.append(
            "vllm-metal: anybody on your network can use this server: set --host 127.0.0.1, or "
            "--api-key"
        )
    print(*printed, sep="\n", flush=True)


def is_open(args: Any) -> bool:
    """Returns whether others on the network can use a server without a key."""
    if args.uds or args.api_key or os.environ.get("VLLM_API_KEY") or envs.serving_config():
        return False
    host = args.host or "0.0.0.0"
    return host != "localhost" and not is_loopback_ip(host)


def address(args: Any) -> str:
    """Returns a server's address for clients on this machine."""
    if args.uds:
        return f"unix:{args.uds}"
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"http{'s' if args.ssl_certfile else ''}://{host}:{args.port}"


def lines(where: str, name: str, context: int, route: str) -> list[str]:
    """Returns the lines that a server prints once it is ready.

    Args:
        where: address of the server.
        name: the model's name in requests.
        context: tokens of prompt and output together.
        route: path of the suggested request, after /v1/.
    """
    # Quotes are escaped for a shell's single-quoted string.
    body = json.dumps({"model": name, **_BODIES[route]}).replace("'", "'\\''")
    socket, url = "", where
    if where.startswith("unix:"):
        socket, url = f"--unix-socket {where.removeprefix('unix:')} ", "http://localhost"
    return [
        f"vllm-metal: serves {name} at {where} (context {context:,} tokens). Try:",
        f"  curl {socket}{url}/v1/{route} -H 'Content-Type: application/json' -d '{body}'",
    ]
