# SPDX-License-Identifier: Apache-2.0
"""What a server says once it answers: where, and how to ask."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

from vllm_metal.settings import envs
from vllm_metal.settings.address import is_loopback_ip

_POLL_S = 0.1
_ASKED: dict[str, dict[str, Any]] = {
    "embeddings": {"input": "Hello"},
    "completions": {"prompt": "Once upon a time", "max_tokens": 32},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}
_tellers: set[asyncio.Task[None]] = set()  # which a loop alone does not keep


def around(app: Any, state: Any) -> Any:
    """Has a server tell once it has started; changes nothing of its application."""
    task = asyncio.get_running_loop().create_task(_tell(state))
    _tellers.add(task)
    task.add_done_callback(_tellers.discard)
    return app


async def _tell(state: Any) -> None:
    while not getattr(getattr(state, "server", None), "started", False):
        await asyncio.sleep(_POLL_S)
    config = state.vllm_config.model_config
    chats = bool(getattr(state.engine_client.tokenizer, "chat_template", None))
    route = "embeddings"
    if config.runner_type != "pooling":
        route = "chat/completions" if chats else "completions"
    told = lines(address(state.args), config.served_model_name, config.max_model_len, route)
    if is_open(state.args):
        told.append(
            "vllm-metal: anybody on your network can use this server: set --host 127.0.0.1, or "
            "--api-key"
        )
    print(*told, sep="\n", flush=True)


def is_open(args: Any) -> bool:
    """Whether others on the network can use a server without a key."""
    if args.uds or args.api_key or os.environ.get("VLLM_API_KEY") or envs.serving_config():
        return False
    host = args.host or "0.0.0.0"
    return host != "localhost" and not is_loopback_ip(host)


def address(args: Any) -> str:
    """Where clients on this machine find a server."""
    if args.uds:
        return f"unix:{args.uds}"
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    return f"http{'s' if args.ssl_certfile else ''}://{host}:{args.port}"


def lines(where: str, name: str, context: int, route: str) -> list[str]:
    """What a server says once it answers.

    Args:
        where: its address.
        name: of the model, in requests.
        context: tokens of prompt and answer together.
        route: of the first request that is proposed, behind /v1/.
    """
    body = json.dumps({"model": name, **_ASKED[route]}).replace("'", "'\\''")
    socket, url = "", where
    if where.startswith("unix:"):
        socket, url = f"--unix-socket {where.removeprefix('unix:')} ", "http://localhost"
    return [
        f"vllm-metal: serves {name} at {where} (context {context:,} tokens). Try:",
        f"  curl {socket}{url}/v1/{route} -H 'Content-Type: application/json' -d '{body}'",
    ]
