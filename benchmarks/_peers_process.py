# SPDX-License-Identifier: Apache-2.0
"""Runs an engine in its own process, which answers commands over pipes.

Commands and answers are lines of JSON; a command is {"do": METHOD, "with": ARGUMENTS}. Between
commands the process blocks on the pipe, and takes no CPU time from the engine being measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from _server import stop

_END_S = 20.0


class PeerError(Exception):
    """A peer failed; the message names its log."""


@dataclass(frozen=True)
class Run:
    """Times of requests sent at once, in seconds since then, per request."""

    first: list[float]  # until the first token
    last: list[float]  # until the last token
    tokens: list[list[int]]

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / max(self.last)


class Recorder:
    """Records when tokens arrive."""

    def __init__(self, num_requests: int) -> None:
        self._started = time.perf_counter()
        self._first = [0.0] * num_requests
        self._last = [0.0] * num_requests
        self._tokens: list[list[int]] = [[] for _ in range(num_requests)]

    def note(self, request: int, tokens: Sequence[int]) -> None:
        """Records the arrival of `tokens` for a request."""
        self._last[request] = time.perf_counter() - self._started
        if not self._tokens[request]:
            self._first[request] = self._last[request]
        self._tokens[request] += tokens

    def run(self) -> Run:
        """Returns the recorded times."""
        return Run(self._first, self._last, self._tokens)


class Peer:
    """The client side of a peer process."""

    def __init__(
        self,
        name: str,
        script: Path,
        options: Mapping[str, object],
        environment: Mapping[str, str | None],
        log: Path,
    ) -> None:
        """Starts the process; `await_ready` waits for it.

        Args:
            script: calls `answer_commands` with a function that takes `options`.
            environment: variables to change; None: unset.
            log: file for the process's output.
        """
        self.name = name
        self.about: dict[str, object] = {}
        self._log = log
        variables = {**os.environ, **environment}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,  # so that the whole group can be stopped
                env={name: value for name, value in variables.items() if value is not None},
            )

    def await_ready(self) -> None:
        """Waits until the engine can serve, and sets `about`.

        Raises:
            PeerError: the engine could not start.
        """
        self.about = self._answer()

    def ask(self, method: str, **arguments: object) -> Any:
        """Returns the result of the engine's method.

        Raises:
            PeerError: the call failed, or the process ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a missing answer then gives a clearer error
            self._process.stdin.write(json.dumps({"do": method, "with": arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, **arguments: object) -> Run:
        """Sends requests at once, with `max_tokens` output tokens each.

        Raises:
            PeerError: an answer has another length.
        """
        run = Run(**self.ask("run", prompts=prompts, max_tokens=max_tokens, **arguments))
        lengths = {len(tokens) for tokens in run.tokens}
        if lengths != {max_tokens}:
            raise PeerError(f"{self.name} answered {lengths} tokens, not {max_tokens}")
        return run

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it exited: {self._process.wait()}"}
        if "error" in answer:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
            raise PeerError(f"{self.name}: {answer['error']}; {self._log} ends:\n{tail}")
        return answer["result"]

    def cpu_seconds(self) -> float:
        """CPU time of the process and its descendants."""
        return cpu_seconds(self._process.pid)

    def close(self) -> None:
        """Ends the process and its descendants."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        stop(self._process)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process and its descendants."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def answer_commands(make: Callable[..., object]) -> None:
    """Answers commands until the input ends.

    Args:
        make: takes the options and returns the engine, with a public method per command. Its
            attribute `about` is sent as the first answer.
    """
    # Keep libraries' output out of the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(do: Callable[[], object]) -> bool:
        try:
            reply = {"result": do()}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.flush()  # earlier output comes before the answer
        print(json.dumps(reply), file=answers, flush=True)
        return "result" in reply

    engine: Any = None

    def start() -> object:
        nonlocal engine
        engine = make(**json.loads(sys.argv[1]))
        return engine.about

    def obey(command: dict[str, Any]) -> object:
        assert not command["do"].startswith("_")
        result = getattr(engine, command["do"])(**command["with"])
        return asdict(result) if isinstance(result, Run) else result

    if not answer(start):
        sys.exit(1)
    for line in sys.stdin:
        command = json.loads(line)
        answer(lambda command=command: obey(command))
