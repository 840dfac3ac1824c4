# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two hosts behind one server, as docs/data-parallel.md has a user start them."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from e2e.server import FORKED, Server, serve, started
from network.hosts import Host

START_TIMEOUT_S = 900.0  # three processes that import vLLM, and two that follow, on two cores
RANKS = ("0", "1")  # as metrics have them


@dataclass(frozen=True)
class Replicas:
    """A server with rank 0 beside it, and the launcher of rank 1 on another host."""

    server: Server
    launcher: Popen[bytes]
    log: Path  # the launcher's

    def metrics(self, name: str) -> list[float]:
        """Of each rank."""
        return [self.server.metric(name, engine=rank) for rank in RANKS]

    def ask(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy tokens of all prompts, which are asked at once."""
        with self.server.client() as client, ThreadPoolExecutor(len(prompts)) as pool:

            def one(prompt: list[int]) -> list[int]:
                reply = client.completions.create(
                    model="m",
                    prompt=prompt,
                    max_tokens=max_tokens,
                    temperature=0,
                    extra_body={"ignore_eos": True, "return_token_ids": True},
                )
                return list(reply.choices[0].token_ids)  # type: ignore[attr-defined]

            return list(pool.map(one, prompts))


def of_server(first: Host) -> tuple[str, ...]:
    """Options of the server, on the first host, with rank 0 beside it."""
    return (
        *("--served-model-name", "m"),
        *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        *("--data-parallel-address", first.address, "--data-parallel-rpc-port", "13345"),
    )


def of_launcher(first: Host) -> tuple[str, ...]:
    """Options of what starts rank 1, on the second host."""
    return (*of_server(first), "--headless", "--data-parallel-start-rank", "1")


@contextmanager
def replicas(
    model: str,
    options: Sequence[str],
    folder: Path,
    hosts: tuple[Host, Host],
    environment: Mapping[str, str] = FORKED,
) -> Iterator[Replicas]:
    """Runs both until the block ends.

    Args:
        model: its model argument.
        options: more of both command lines.
        folder: for logs.
        hosts: of the server, and of rank 1.
        environment: variables to add to this process's.
    """
    first, second = hosts
    headless, log = [*of_launcher(first), *options], folder / "rank-1.log"
    with (
        started(model, headless, environment, log, host=second) as launcher,
        serve(
            model,
            [*of_server(first), *options],
            folder / "rank-0.log",
            environment=environment,
            start_timeout_s=START_TIMEOUT_S,
            host=first,
        ) as server,
    ):
        yield Replicas(server, launcher, log)
