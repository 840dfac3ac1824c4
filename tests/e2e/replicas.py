# SPDX-License-Identifier: Apache-2.0
"""Runs two ranks on two hosts behind one server, as described in docs/data-parallel.md."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from e2e.server import FORKED, Server, serve, started
from network.hosts import Host

START_TIMEOUT_S = 900.0  # five processes on two cores, three of which import vLLM
RANKS = ("0", "1")  # as labeled in metrics


@dataclass(frozen=True)
class Replicas:
    """A server with rank 0, and the launcher of rank 1 on another host."""

    server: Server
    launcher: Popen[bytes]
    log: Path  # log of the launcher

    def metrics(self, name: str) -> list[float]:
        """Returns a metric of each rank."""
        return [self.server.metric(name, engine=rank) for rank in RANKS]

    def ask(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Sends all prompts at once; returns their greedy tokens."""
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
    """Returns the options of the server with rank 0, on the first host."""
    return (
        *("--served-model-name", "m"),
        *("--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        *("--data-parallel-address", first.address, "--data-parallel-rpc-port", "13345"),
    )


def of_launcher(first: Host) -> tuple[str, ...]:
    """Returns the options of the launcher of rank 1, on the second host."""
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
        model: the model argument.
        options: more options for both command lines.
        folder: for logs.
        hosts: hosts of the server and of rank 1.
        environment: additional variables.
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
