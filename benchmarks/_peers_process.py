# SPDX-License-Identifier: Apache-2.0
"""An engine in a process of its own, which answers commands over pipes.

A command is a line of JSON, {"do": METHOD, "with": ARGUMENTS}; so is its answer. Between commands
the process is blocked on the pipe, so that it takes nothing from the engine whose turn it is.
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
    """A peer did not do what was asked; the message says where its log is."""


@dataclass(frozen=True)
class Run:
    """Requests that were sent at once; times in seconds since then, by request."""

    first: list[float]  # until its first token
    last: list[float]  # until its last one
    tokens: list[list[int]]

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens)) / max(self.last)


class Recorder:
    """Notes when tokens came."""

    def __init__(self, num_requests: int) -> None:
        self._started = time.perf_counter()
        self._first = [0.0] * num_requests
        self._last = [0.0] * num_requests
        self._tokens: list[list[int]] = [[] for _ in range(num_requests)]

    def note(self, request: int, tokens: Sequence[int]) -> None:
        """`tokens` of a request are here now."""
        self._last[request] = time.perf_counter() - self._started
        if not self._tokens[request]:
            self._first[request] = self._last[request]
        self._tokens[request] += tokens

    def run(self) -> Run:
        """What was noted."""
        return Run(self._first, self._last, self._tokens)


class Peer:
    """The side that asks."""

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
            script: calls `answer_commands` with what takes `options`.
            environment: variables that differ from this process's; None: not set.
            log: file for all that the process prints.
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
                start_new_session=True,  # so that all it starts can be stopped as one group
                env={name: value for name, value in variables.items() if value is not None},
            )

    def await_ready(self) -> None:
        """Waits until the engine can serve; `about` then has what it says of itself.

        Raises:
            PeerError: it could not start.
        """
        self.about = self._answer()

    def ask(self, method: str, **arguments: object) -> Any:
        """What the engine's method returns.

        Raises:
            PeerError: it failed, or its process ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either, which says more
            self._process.stdin.write(json.dumps({"do": method, "with": arguments}) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, **arguments: object) -> Run:
        """The answers to requests of so many output tokens, which are all sent at once.

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
        """CPU time of the process and of all that it started."""
        return cpu_seconds(self._process.pid)

    def close(self) -> None:
        """Ends the process and all that it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        stop(self._process)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all that it started."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def answer_commands(make: Callable[..., object]) -> None:
    """The side that answers: runs until its input ends.

    Args:
        make: takes the options and returns the engine, whose public methods are the commands. Its
            attribute `about` is the first answer.
    """
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(do: Callable[[], object]) -> bool:
        try:
            reply = {"result": do()}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.flush()  # an answer is behind what was printed before it
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
