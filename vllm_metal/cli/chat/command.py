# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal chat`: serves the chat page, and starts a model server for it if needed."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import webbrowser
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vllm_metal.cli import early_checks, local_server
from vllm_metal.cli.chat import surroundings
from vllm_metal.cli.chat.upstream import Upstream
from vllm_metal.cli.local_server import HOST, KEY_OF_SERVER
from vllm_metal.settings.extras import install_advice

if TYPE_CHECKING:
    import uvicorn

_POLL = 1.0  # seconds
_START_POLL = 0.02
_ANSWER_S = 2.0
_OWN = {
    "--max-model-len": "write it before --serve",
    "--kv-cache-memory-bytes": "write --kv-cache-gib",
    "--model": "write MODEL",
}
_NEEDED = ("starlette", "uvicorn", "httpx", "markdown_it", "pygments", "prometheus_client")


def run(args: Namespace) -> int:
    """Serves the chat until the user ends it, and returns the exit status.

    Raises ValueError for conflicting options, OSError if the port is in use, and ImportError if a
    package of the extra `chat` is missing.
    """
    if args.terminal:
        raise ValueError(
            "chat --terminal and its options were removed: with `vllm serve MODEL` running, type "
            f"`vllm chat --url http://{HOST}:8000/v1`"
        )
    if args.url is not None and args.model is not None:
        raise ValueError("chat --url uses a running server: leave out MODEL")
    if args.serve and args.url is not None:
        raise ValueError("chat --url starts no server: leave out --serve")
    local_server.check_options(args.serve, _OWN)
    early_checks.check_pool(args.kv_cache_gib)
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ImportError(f"the page needs {', '.join(missing)}: {install_advice('chat')}")
    with _listening(args.port) as listener:
        if args.url is not None:
            upstream = Upstream(args.url, os.environ.get(KEY_OF_SERVER))
            _warn_if_unreachable(args.url)
            return _show(listener, upstream, args.open)
        return _serve_and_show(args, listener)


def _warn_if_unreachable(url: str) -> None:
    # Only a warning: the page is shown anyway, and connects to a server that starts later.
    import httpx  # from the extra `chat`

    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=_ANSWER_S)
    except httpx.HTTPError:
        print(
            f"vllm-metal: nothing answers at {url}: start that server, or name another by --url",
            file=sys.stderr,
        )


def _serve_and_show(args: Namespace, listener: socket.socket) -> int:
    surroundings.prepare(offline=args.model is None, quiet=False)
    if args.model is not None:
        early_checks.check_model(args.model)
        if not any(option.startswith("--chat-template") for option in args.serve):
            early_checks.check_template(args.model)
    model = args.model or str(_default_model())
    context = -1 if args.max_model_len is None else args.max_model_len
    flags = ["--max-model-len", str(context)]
    flags += ["--kv-cache-memory-bytes", str(int(args.kv_cache_gib * 2**30))]
    flags += args.serve
    name = local_server.request_name(model)
    with TemporaryDirectory(prefix="vllm-metal-chat-") as scratch:  # accessible to this user only
        log = local_server.output_file("chat", Path(scratch))
        path = Path(scratch) / "server"
        command = local_server.serve_command(model, name, path, flags)
        no_key = {KEY_OF_SERVER: ""}  # not needed: only this user can reach the socket
        with (
            local_server.listening(path) as listening,
            local_server.started(command, no_key, listening, log, sys.stderr) as process,
        ):
            upstream = Upstream(f"http://{HOST}", None, path)
            return _show(listener, upstream, args.open, lambda: process.poll() is None)


def _default_model() -> Path:
    print("Making the embedded model ready ...", flush=True)
    return surroundings.default_model()


def _show(
    listener: socket.socket,
    upstream: Upstream,
    open_page: bool,
    alive: Callable[[], bool] = lambda: True,
) -> int:
    """Serves the page until Ctrl-C, or until its model server ends; returns the exit status.

    Args:
        listener: bound to the page's address.
        upstream: the model server.
        open_page: whether to open the page in the user's browser.
        alive: returns whether the model server still runs.
    """
    import uvicorn

    from vllm_metal.cli.chat import page

    token = secrets.token_urlsafe()
    address = f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"

    async def serve() -> tuple[bool, SystemExit | None]:
        server = uvicorn.Server(
            uvicorn.Config(
                page.app(upstream, token), log_level="warning", timeout_graceful_shutdown=1
            )
        )
        serving = asyncio.create_task(_serve_page(server, listener))
        while not server.started and not serving.done():
            await asyncio.sleep(_START_POLL)
        print(f"Chat: {address}   (Ctrl-C ends it)", flush=True)
        if open_page and _has_windows():
            _open(address, scratch)
        while not serving.done() and alive():
            await asyncio.wait((serving,), timeout=_POLL)
        ended = serving.done()
        server.should_exit = True
        return ended, await serving

    with TemporaryDirectory(prefix="vllm-metal-page-") as scratch:
        try:
            ended_by_user, exit_request = asyncio.run(serve())
        except KeyboardInterrupt:  # uvicorn raises it again after its shutdown
            return 0
    if exit_request is not None:
        raise exit_request
    if not ended_by_user:
        print("vllm-metal: error: the server has ended: start the chat again", file=sys.stderr)
    return 0 if ended_by_user else 1


async def _serve_page(server: uvicorn.Server, listener: socket.socket) -> SystemExit | None:
    """Serves the page; returns the SystemExit that a signal raised, if any."""
    try:
        await server.serve(sockets=[listener])
    # uvicorn raises SIGTERM again after its shutdown; raised in a task, SystemExit would end the
    # loop before `_show` could clean up.
    except SystemExit as end:
        return end
    return None


def _open(address: str, folder: str) -> None:
    """Opens the page in the user's browser, without showing its token on a command line."""
    # Elsewhere the address is an argument of the browser, which other users can see.
    if sys.platform != "darwin":
        path = Path(folder) / "page.html"
        path.write_text(f'<meta http-equiv="refresh" content="0; url={address}">')
        address = path.as_uri()
    webbrowser.open(address)


def _has_windows() -> bool:
    # Without a display, a text browser would open and occupy the terminal.
    return sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise OSError(
                f"port {port} is in use ({error.strerror}): choose another with --port. "
                "Browsers keep conversations per port"
            ) from error
        yield listener
