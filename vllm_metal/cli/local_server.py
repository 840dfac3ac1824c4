# SPDX-License-Identifier: Apache-2.0
"""Finds a running server on this machine, or runs one for as long as it is needed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import httpx

from vllm_metal.cli import listeners
from vllm_metal.cli.own_server import STOP_S, lifeline
from vllm_metal.cli.start_progress import StartProgress
from vllm_metal.patches.vllm_patches import start_log
from vllm_metal.patches.vllm_patches.start_failures import ERROR_PREFIX
from vllm_metal.settings import log_files

HOST = "127.0.0.1"
KEY_OF_SERVER = "VLLM_API_KEY"  # vLLM's own variable, so that the key is in no command line
_POLL_S = 0.25
_POLL_TIMEOUT_S = 2.0  # the listener is there before its server
OWN_SERVER = "vllm_metal.cli.own_server"
_GUARD = "vllm_metal.serving.local_only.LocalOnly"
_MOST_OUTPUT = 16384  # tokens of an answer; what these clients ask of hosted models is more
#: Options of `vllm serve` that say where a server is found, which who starts one must know.
_PLACE = ("--host", "--port", "--uds", "--served-model-name")
_SHOWN = {"TQDM_POSITION": "-1"}  # has the hub's bars shown where there is no terminal
_TAIL = 20  # lines of the log of a server that does not start


@dataclass(frozen=True)
class Endpoint:
    """A server, as clients see it."""

    root: str  # http://host:port, without a path
    model: str  # the name in requests
    key: str
    context: int  # tokens of prompt and answer together

    @property
    def output(self) -> int:
        """Most tokens of an answer: a quarter of the context, so that prompts have the rest."""
        return min(_MOST_OUTPUT, self.context // 4)


def running(port: int, key: str, model: str | None) -> Endpoint | None:
    """The server on a port of this machine; None: nobody listens there.

    Args:
        port: of the server.
        key: to ask it with; "" where it has none.
        model: its name in requests, which must be served; None: the first that is.

    Raises:
        ValueError: it serves another model, wants another key, or is no such server.
    """
    root = f"http://{HOST}:{port}"
    if (owner := listeners.owner(port)) not in (None, os.getuid(), 0):
        raise ValueError(
            f"another user (uid {owner}) listens on port {port}, so no request is sent to "
            "it: choose another --port"
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # Not through the user's proxy.
        with httpx.Client(trust_env=False, timeout=10) as client:
            answer = client.get(f"{root}/v1/models", headers=headers)
    except httpx.ConnectError:
        return None
    except httpx.HTTPError as error:
        raise ValueError(f"the process on port {port} is not a vLLM server: {error}") from error
    if answer.status_code == 401:
        raise ValueError(f"the server on port {port} requires an API key: set {KEY_OF_SERVER}")
    try:
        served = {entry["id"]: entry.get("max_model_len") for entry in answer.json()["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the process on port {port} is not a vLLM server; choose another --port"
        ) from error
    name = model or next(iter(served), "")
    if name not in served:
        raise ValueError(
            f"the server on port {port} serves {', '.join(served)} and not {model}: leave "
            "MODEL out, stop that server, or choose another --port"
        )
    return Endpoint(root, name, key or "none", served[name] or 0)


@contextmanager
def listening(place: int | Path) -> Iterator[socket.socket]:
    """Listens where a server is to be, before it is started: nobody else can answer there.

    Args:
        place: a port of this machine, or a path for a Unix socket that other users cannot reach.

    Raises:
        ValueError: the port is taken.
    """
    unix = isinstance(place, Path)
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as listener:
        try:
            if unix:
                listener.bind(str(place))
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((HOST, place))
        except OSError as error:
            raise ValueError(
                f"cannot listen on {place if unix else f'port {place}'} ({error.strerror})"
            ) from error
        listener.listen()
        yield listener


@contextmanager
def started(
    command: Sequence[str],
    environment: Mapping[str, str],
    listener: socket.socket,
    log: Path,
    told: TextIO,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server in a `with` block, from when it answers to the end of the block.

    It ends with this process as well, however that ends.

    Args:
        command: `python -m MODULE`, and arguments of `vllm`.
        environment: variables to add to this process's.
        listener: that it will answer on.
        log: file for what it prints.
        told: gets its progress, a line that is written over where it is a terminal.

    Yields:
        Its process.

    Raises:
        ValueError: it ended before it answered; the message has the end of its log.
    """
    with lifeline() as followed:
        given = followed, listener.fileno()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", OWN_SERVER, *map(str, given), *command[3:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_SHOWN, **environment},
                pass_fds=given,
                start_new_session=True,  # Ctrl-C in the client is the client's
            )
        try:
            _wait(process, listener, log, told)
            listener.close()  # so that nobody waits for a server that has ended
            yield process
        finally:
            _stop(process)


def output_file(kind: str, scratch: Path) -> Path:
    """Where what a server prints is to go.

    Its log is a file of its own, unless its user chose another; then what it prints is kept.

    Args:
        kind: of the command, for the name of a file that is kept.
        scratch: a folder that goes with the command.
    """
    return log_files.begin(kind) if start_log.chosen_by_the_user() else scratch / "server.log"


def _wait(
    process: subprocess.Popen[bytes], listener: socket.socket, log: Path, told: TextIO
) -> None:
    """Waits until /health answers, however long it takes: a model may have to be fetched first."""
    progress = StartProgress(log, told)
    address = listener.getsockname()
    unix = isinstance(address, str)
    transport = httpx.HTTPTransport(uds=address if unix else None)
    root = f"http://{HOST}" if unix else f"http://{HOST}:{address[1]}"
    with httpx.Client(trust_env=False, timeout=_POLL_TIMEOUT_S, transport=transport) as client:
        while process.poll() is None:
            with suppress(httpx.TransportError):  # nobody reads yet
                if client.get(f"{root}/health").status_code == 200:
                    progress.ready()
                    return
            progress.show()
            time.sleep(_POLL_S)
    progress.ended()
    raise ValueError(_cause(log.read_text(errors="replace").splitlines(), process.returncode))


def _cause(lines: list[str], status: int) -> str:
    """Why a server has ended: what it says itself, or its last lines."""
    for at, line in enumerate(lines):
        if line.startswith(ERROR_PREFIX):
            return "\n".join([line.removeprefix(ERROR_PREFIX), *lines[at + 1 :]])
    tail = "\n".join(lines[-_TAIL:])
    return f"the server ended with status {status}; its log ends:\n{tail}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then kills what is left of all that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    # On macOS a group of which only zombies are left may not be signaled.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def request_name(model: str) -> str:
    """The model's name in requests: a folder's last part, or its name on the hub."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.name
    return path.resolve().name if path.is_dir() else model


def check_options(given: Sequence[str], own: Mapping[str, str]) -> None:
    """Refuses options for a server that the command which starts it sets by itself.

    Args:
        given: a user's options of `vllm serve`.
        own: options that the command has another way for, and what to write in place of each.

    Raises:
        ValueError: they set where the server is found, or what the command has an option for.
    """
    advice = dict.fromkeys((*_PLACE, "--api-key"), "this command sets it") | dict(own)
    for option in given:
        name = option.partition("=")[0].replace("_", "-")
        if option.startswith("--") and name in advice:
            raise ValueError(f"{name} behind --serve: {advice[name]}")


def serve_command(
    model: str, name: str, place: int | Path, flags: Sequence[str]
) -> tuple[str, ...]:
    """The command of a server, which tells clients how much of a prompt was cached.

    Args:
        model: a folder or a name on the hub.
        name: of the model in requests.
        place: a port to listen on, for this machine and whoever has the key, or a Unix socket.
        flags: more of `vllm serve`.
    """
    where: tuple[str, ...] = ("--uds", str(place))
    guard: tuple[str, ...] = ()
    if not isinstance(place, Path):
        where = ("--host", HOST, "--port", str(place))
        guard = ("--middleware", _GUARD)  # the last one is the outermost
    serve = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model)
    named = ("--served-model-name", name, "--enable-prompt-tokens-details")
    return (*serve, *where, *named, *flags, *guard)
