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

HOST = "127.0.0.1"
KEY_OF_SERVER = "VLLM_API_KEY"  # vLLM's own variable, so that the key is in no command line
_POLL_S = 0.25
_STOP_S = 30.0  # after it the server is killed
_MOST_OUTPUT = 16384  # tokens of an answer; what these clients ask of hosted models is more
#: Options of `vllm serve` that say where a server is found, which who starts one must know.
_PLACE = ("--host", "--port", "--served-model-name")
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
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        # Not through the user's proxy.
        with httpx.Client(trust_env=False, timeout=10) as client:
            answer = client.get(f"{root}/v1/models", headers=headers)
    except httpx.ConnectError:
        return None
    except httpx.HTTPError as error:
        raise ValueError(f"what listens on port {port} is no server of vLLM's: {error}") from error
    if answer.status_code == 401:
        raise ValueError(f"the server on port {port} wants its key: set {KEY_OF_SERVER} to it")
    try:
        served = {entry["id"]: entry.get("max_model_len") for entry in answer.json()["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"what listens on port {port} is no server of vLLM's; choose another --port"
        ) from error
    name = model or next(iter(served), "")
    if name not in served:
        raise ValueError(
            f"the server on port {port} serves {', '.join(served)} and not {model}: leave MODEL "
            "out, end that server, or choose another --port"
        )
    return Endpoint(root, name, key or "none", served[name] or 0)


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], port: int, log: Path, told: TextIO
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a server in a `with` block, from when it answers to the end of the block.

    Args:
        command: of the server.
        environment: variables to add to this process's.
        port: that it will listen on.
        log: file for what it prints.
        told: gets its progress, a line that is written over where it is a terminal.

    Yields:
        Its process.

    Raises:
        ValueError: it ended before it answered; the message has the end of its log.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C in the client is the client's
        )
    try:
        _wait(process, port, log, told)
        yield process
    finally:
        _stop(process)


def _wait(process: subprocess.Popen[bytes], port: int, log: Path, told: TextIO) -> None:
    """Waits until /health answers, however long it takes: a model may have to be fetched first."""
    began, shown = time.monotonic(), ""
    with httpx.Client(trust_env=False, timeout=10) as client:
        while process.poll() is None:
            with suppress(httpx.TransportError):  # no one listens yet
                if client.get(f"http://{HOST}:{port}/health").status_code == 200:
                    _clear(told)
                    return
            shown = _tell(told, time.monotonic() - began, shown)
            time.sleep(_POLL_S)
    _clear(told)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
    raise ValueError(f"the server ended with status {process.returncode}; its log ends:\n{tail}")


def _tell(told: TextIO, seconds: float, shown: str) -> str:
    """Says how long it takes, each second on a terminal, else each half minute; the line."""
    step = 1 if told.isatty() else 30
    line = f"vllm-metal: the server starts ({int(seconds) // step * step} s)"
    if line != shown:
        told.write(f"\r{line}" if told.isatty() else f"{line}\n")
        told.flush()
    return line


def _clear(told: TextIO) -> None:
    if told.isatty():
        told.write("\r\x1b[K")
        told.flush()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end, then kills what is left of all that it started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    # On macOS a group of which only zombies are left may not be signalled.
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
    return path.resolve().name if path.is_dir() else model


def check_options(given: Sequence[str], own: Mapping[str, str]) -> None:
    """Refuses options for a server that the command which starts it sets by itself.

    Args:
        given: a user's options of `vllm serve`.
        own: options that the command has another way for, and what to write in place of each.

    Raises:
        ValueError: they set where the server is found, or what the command has an option for.
    """
    advice = dict.fromkeys((*_PLACE, "--api-key"), "the command sets it by itself") | dict(own)
    for option in given:
        name = option.partition("=")[0].replace("_", "-")
        if option.startswith("--") and name in advice:
            raise ValueError(f"{name} behind --serve: {advice[name]}")


def serve_command(model: str, name: str, port: int, flags: Sequence[str]) -> tuple[str, ...]:
    """The command of a server, which tells clients how much of a prompt was cached.

    Args:
        model: a folder or a name on the hub.
        name: of the model in requests.
        port: to listen on, for this machine alone.
        flags: more of `vllm serve`.
    """
    place = ("--host", HOST, "--port", str(port), "--served-model-name", name)
    serve = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model)
    return (*serve, *place, "--enable-prompt-tokens-details", *flags)
