# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal launch`: decides what to start, starts it and ends it."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_metal.cli.launch import planning
from vllm_metal.cli.launch.clients import CLIENTS, Client, Start
from vllm_metal.cli.local_server import (
    HOST,
    KEY_OF_SERVER,
    Endpoint,
    check_options,
    listening,
    output_file,
    request_name,
    running,
    serve_command,
    started,
)

HIDDEN = "..."  # printed instead of an API key
_OWN = {"--max-model-len": "write --context", "--model": "write MODEL"}


@dataclass(frozen=True)
class Plan:
    """The client to start, and its server."""

    endpoint: Endpoint
    command: tuple[str, ...]  # the server's command; empty if it is already running
    notes: tuple[str, ...] = ()  # remarks on the choice


def run(args: Namespace) -> int:
    """Starts a client with a server of this machine, and returns the client's exit status.

    Raises ValueError if the client is not installed, or there is no server for it.
    """
    client = CLIENTS[args.client]
    executable = shutil.which(client.executable)
    if executable is None and not args.print:
        raise ValueError(f"{client.executable} is not installed: {client.install}")
    check_options(args.serve, _OWN)
    key = os.environ.get(KEY_OF_SERVER, "")
    found = running(args.port, key, args.model and request_name(args.model))
    if found and args.serve:
        raise ValueError(
            f"the server on port {args.port} is already running, so --serve has no effect: "
            "stop that server, or choose another --port"
        )
    plan = Plan(found, ()) if found else _plan_server(args, key or secrets.token_urlsafe())
    with TemporaryDirectory(prefix="vllm-metal-launch-") as scratch:
        start = client.start(plan.endpoint, Path(scratch))
        if args.print:
            print(_text(plan, client, start, args.behind))
            return 0
        with _served(plan, Path(scratch)):
            return _run(executable or "", start, args.behind, Path(scratch))


def _plan_server(args: Namespace, key: str) -> Plan:
    planned = planning.planned(args.model, args.context)
    name = request_name(planned.model)
    root = f"http://{HOST}:{args.port}"
    command = serve_command(planned.model, name, args.port, [*planned.flags, *args.serve])
    return Plan(Endpoint(root, name, key, planned.context), command, tuple(planned.notes))


@contextmanager
def _served(plan: Plan, scratch: Path) -> Iterator[None]:
    for line in plan.notes:
        print(f"vllm-metal: {line}", file=sys.stderr)
    with ExitStack() as stack:
        if plan.command:
            port = int(plan.endpoint.root.rpartition(":")[2])
            listener = stack.enter_context(listening(port))
            log = output_file("launch", scratch)
            environment = {KEY_OF_SERVER: plan.endpoint.key}
            stack.enter_context(started(plan.command, environment, listener, log, sys.stderr))
        yield


def _run(executable: str, start: Start, arguments: Sequence[str], scratch: Path) -> int:
    for name, text in start.files.items():
        (scratch / name).write_text(text)
    kept = {name: value for name, value in os.environ.items() if name not in start.without}
    process = subprocess.Popen(
        [executable, *start.arguments, *arguments], env=kept | dict(start.environment)
    )
    while True:
        try:
            status = process.wait()
        except KeyboardInterrupt:  # Ctrl-C is for the client, which got it from the terminal too
            continue
        except BaseException:  # this process shall end, and the client with it
            process.terminate()
            process.wait()
            raise
        return 128 - status if status < 0 else status  # as shells report signals


def _text(plan: Plan, client: Client, start: Start, arguments: Sequence[str]) -> str:
    lines = list(plan.notes)
    if plan.command:
        lines += ["", "Server, which ends with the client:"]
        lines += [f"  {KEY_OF_SERVER}={HIDDEN} {shlex.join(plan.command)}"]
    else:
        lines += ["", f"Server: already running at {plan.endpoint.root}, and keeps running"]
    lines += ["", "Client:"]
    lines += [f"  unset {name}" for name in start.without]
    lines += [f"  export {line}" for line in _variables(start.environment, plan.endpoint.key)]
    lines += [f"  {shlex.join([client.executable, *start.arguments, *arguments])}"]
    for name, text in start.files.items():
        lines += ["", f"Temporary file {name}:", text.rstrip()]
    return "\n".join(lines).lstrip()


def _variables(environment: Mapping[str, str], key: str) -> Iterator[str]:
    for name, value in environment.items():
        yield f"{name}={HIDDEN if value == key else shlex.quote(value)}"
