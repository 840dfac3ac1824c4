# SPDX-License-Identifier: Apache-2.0
"""Finds a running server on this machine, or runs one as long as it is needed."""

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
_POLL_TIMEOUT_S = 2.0  # needed because the socket listens before the server reads from it
OWN_SERVER = "vllm_metal.cli.own_server"
_GUARD = "vllm_metal.serving.local_only.LocalOnly"
_MOST_OUTPUT = 16384  # tokens of an answer; from hosted models these clients request more
#: Options of `vllm serve` that set where a server is found; whoever starts one must know them.
_ADDRESS_OPTIONS = ("--host", "--port", "--uds", "--served-model-name")
_SHOWN = {"TQDM_POSITION": "-1"}  # shows the hub's progress bars without a terminal
_TAIL = 20  # lines of the log of a server that does not start


@dataclass(frozen=True)
class Endpoint:
    """Address, model, API key and context of a running server."""

    root: str  # http://host:port, without a path
    model: str  # the name in requests
    key: str
    context: int  # tokens of prompt and answer together

    @property
    def output(self) -> int:
        """Maximum tokens of an answer: a quarter of the context; prompts get the rest."""
        return min(_MOST_OUTPUT, self.context // 4)


def running(port: int, key: str, model: str | None) -> Endpoint | None:
    """Returns the server on a local port, or None if nobody listens there.

    Args:
        port: port of the server.
        key: API key; "" for none.
        model: name in requests that must be served; None for the first one listed.

    Raises:
        ValueError: the server has another model, requires another key, or is not vLLM's.
    """
    root = f"http://{HOST}:{port}"
    if (owner := listeners.owner(port)) not in (None, os.getuid(), 0):
        raise ValueError(
            f"another user (uid {owner}) listens on port {port}, so no request is sent to "
            "it: choose another --port"
        )
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # Bypasses the user's proxy.
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
    """Listens at `place` before the server starts, so that no other process can answer there.

    `place`: a local port, or the path of a Unix socket that other users cannot reach. Raises
    ValueError if the port is taken.
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
    stream: TextIO,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server in a `with` block that begins once the server answers.

    The server also ends with this process, however that ends.

    Args:
        command: `python -m MODULE`, and arguments of `vllm`.
        environment: variables added to this process's.
        listener: socket that the server will accept on.
        log: file for the server's output.
        stream: stream for progress; on a terminal, one line that is overwritten.

    Raises:
        ValueError: the server ended before it answered; the message quotes the end of its log.
    """
    with lifeline() as followed:
        descriptors = followed, listener.fileno()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", OWN_SERVER, *map(str, descriptors), *command[3:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_SHOWN, **environment},
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in the client is the client's
            )
        try:
            _wait(process, listener, log, stream)
            # Now only the server holds the socket, so clients get an error once it has ended.
            listener.close()
            yield process
        finally:
            _stop(process)


def output_file(kind: str, scratch: Path) -> Path:
    """Returns the file for a server's output.

    It stays as a log of command `kind` if the user has configured vLLM's logging. Otherwise it is
    in the temporary folder `scratch`.
    """
    # A server writes a log of its own, unless the user chose another; only then its output is kept.
    return log_files.begin(kind) if start_log.chosen_by_the_user() else scratch / "server.log"


def _wait(
    process: subprocess.Popen[bytes], listener: socket.socket, log: Path, stream: TextIO
) -> None:
    progress = StartProgress(log, stream)
    address = listener.getsockname()
    unix = isinstance(address, str)
    transport = httpx.HTTPTransport(uds=address if unix else None)
    root = f"http://{HOST}" if unix else f"http://{HOST}:{address[1]}"
    with httpx.Client(trust_env=False, timeout=_POLL_TIMEOUT_S, transport=transport) as client:
        # Without a time limit: the model may have to be downloaded first.
        while process.poll() is None:
            with suppress(httpx.TransportError):  # nobody reads from the socket yet
                if client.get(f"{root}/health").status_code == 200:
                    progress.ready()
                    return
            progress.show()
            time.sleep(_POLL_S)
    progress.ended()
    raise ValueError(_cause(log.read_text(errors="replace").splitlines(), process.returncode))


def _cause(lines: list[str], status: int) -> str:
    # The server's own error message if there is one, else the last lines of its log.
    for index, line in enumerate(lines):
        if line.startswith(ERROR_PREFIX):
            return "\n".join([line.removeprefix(ERROR_PREFIX), *lines[index + 1 :]])
    tail = "\n".join(lines[-_TAIL:])
    return f"the server ended with status {status}; its log ends:\n{tail}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    # Kills what is left of its group. macOS raises PermissionError if only zombies are left.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def request_name(model: str) -> str:
    """Returns a model's name in requests: a folder's last part, or the hub name."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.name
    return path.resolve().name if path.is_dir() else model


def check_options(given: Sequence[str], own: Mapping[str, str]) -> None:
    """Raises ValueError for an option of `vllm serve` that the calling command sets itself.

    `own` maps further such options to what to write instead.
    """
    advice = dict.fromkeys((*_ADDRESS_OPTIONS, "--api-key"), "this command sets it") | dict(own)
    for option in given:
        name = option.partition("=")[0].replace("_", "-")
        if option.startswith("--") and name in advice:
            raise ValueError(f"{name} after --serve is not supported: {advice[name]}")


def serve_command(
    model: str, name: str, place: int | Path, flags: Sequence[str]
) -> tuple[str, ...]:
    """Returns the command of a server that reports cached prompt tokens.

    Args:
        model: folder or hub name.
        name: name in requests.
        place: local port, guarded by the key, or a Unix socket.
        flags: further options of `vllm serve`.
    """
    where: tuple[str, ...] = ("--uds", str(place))
    guard: tuple[str, ...] = ()
    if not isinstance(place, Path):
        where = ("--host", HOST, "--port", str(place))
        guard = ("--middleware", _GUARD)  # the last one is the outermost
    serve = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model)
    named = ("--served-model-name", name, "--enable-prompt-tokens-details")
    return (*serve, *where, *named, *flags, *guard)
