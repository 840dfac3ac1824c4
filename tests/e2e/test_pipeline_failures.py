# SPDX-License-Identifier: Apache-2.0
"""A rank that ends or hangs: clients hear of it within ten seconds, and nothing is left behind."""

import os
import re
import signal
import threading
import time

import openai
import psutil
import pytest
from e2e.server import serve

SECONDS = 10.0
OPTIONS = (
    *("--served-model-name", "toy"),
    *("--max-model-len", "1024"),
    *("--kv-cache-memory-bytes", str(32 << 20)),
    *("--pipeline-parallel-size", "2"),
)


def workers(server):
    """Processes of the ranks, by what their lines in the log begin with."""
    found = re.findall(r"\(Worker_PP(\d) pid=(\d+)\)", server.log.read_text())
    return {int(rank): psutil.Process(int(pid)) for rank, pid in found}


def long_answers(server, count, heard):
    """Asks for long texts, and notes when and with what error each ends."""

    def ask(number):
        with server.client() as client:
            try:
                stream = client.completions.create(
                    model="toy",
                    prompt=f"Number {number}",
                    max_tokens=900,
                    stream=True,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
                started.release()
                for _ in stream:
                    pass
                heard.append((time.monotonic(), None))
            except (openai.APIError, Exception) as error:
                heard.append((time.monotonic(), error))

    started = threading.Semaphore(0)
    threads = [threading.Thread(target=ask, args=(each,)) for each in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert started.acquire(timeout=60)
    return threads


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_rank_ends(short, tmp_path, rank, number):
    with serve(short, OPTIONS, tmp_path / "log") as server:
        ranks, heard = workers(server), []
        threads = long_answers(server, 3, heard)
        time.sleep(1)
        before = time.monotonic()
        os.kill(ranks[rank].pid, number)
        for thread in threads:
            thread.join(60)
        assert len(heard) == 3
        assert all(error is not None for _, error in heard)
        assert max(at for at, _ in heard) - before < SECONDS
        server.process.wait(60)
    if number == signal.SIGSTOP:
        ranks[rank].wait(30)
    assert not any(process.is_running() for process in ranks.values())
    with serve(short, OPTIONS, tmp_path / "again") as server, server.client() as client:
        assert client.completions.create(model="toy", prompt="One", max_tokens=2).choices
