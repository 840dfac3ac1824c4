# SPDX-License-Identifier: Apache-2.0
"""Ranks that end or hang: clients get an error within ten seconds, nothing leaks."""

import os
import signal
import time

import psutil
import pytest
from e2e import ranks
from e2e.harness import Dense
from e2e.server import SPAWNED, serve

pytestmark = pytest.mark.slow

PROMPT = [3, 5, 7]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hang"])
@ranks.by_layers_and_by_heads
def test_ranks_that_are_killed_or_hang(tiny, tmp_path, shape, number):
    """Each later start is clean: it answers with the right tokens."""
    model, options = ranks.endless(tiny, tmp_path / "model"), (*ranks.OPTIONS, *shape)
    dense = Dense(tiny)
    for rank in (1, 0, None):
        with serve(model, options, tmp_path / f"log-{rank}", environment=SPAWNED) as server:
            dense.check(PROMPT, ranks.tokens(server.url, PROMPT))
            if rank is not None:
                _end(server, number, rank)


def _end(server, number, rank):
    """Signals a rank while four clients wait for answers."""
    waiting = ranks.clients(server)
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    of_ranks = ranks.workers(server)
    assert set(of_ranks.values()) <= set(everyone) and len(of_ranks) == 2
    time.sleep(1)  # in the midst of steps
    since = time.monotonic()
    os.kill(of_ranks[rank].pid, number)
    ranks.all_hear(waiting, since)
    server.process.wait(60)
    _, left = psutil.wait_procs(everyone, 30)
    assert not left
