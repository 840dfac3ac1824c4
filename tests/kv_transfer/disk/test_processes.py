# SPDX-License-Identifier: Apache-2.0
"""Several engines in one root, and engines that are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kv_transfer.disk import naive

from vllm_metal.kv_transfer.disk import maintenance
from vllm_metal.kv_transfer.disk.ledger import Ledger
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.space import WriteResult
from vllm_metal.kv_transfer.disk.store import DiskStore

TESTS = Path(__file__).parents[2]
LIMIT = 4096 * 20


def start(root, seed, writes, dies=""):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "kv_transfer.disk.engine"),
            *(str(root), str(LIMIT), str(seed), str(writes), dies),
        ],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def check(root):
    """Compares files with the locked ledger."""
    ledger = Ledger(root)
    try:
        with ledger.locked() as balance:
            held = naive.room(root)
            assert held <= LIMIT
            assert balance is None or held <= balance.bytes
    finally:
        ledger.close()


def test_two_engines_that_write_and_evict_keep_the_limit(root):
    children = [start(root, seed, 300) for seed in range(2)]
    naive.wait_until(lambda: naive.files(root))
    for _ in range(100):
        check(root)
        time.sleep(0.002)
    results = [list(map(int, child.communicate()[0].split())) for child in children]
    assert [child.returncode for child in children] == [0, 0]
    for written, read, evicted, refused in results:
        assert written > 100 and read > 100 and evicted > 50
        assert refused == 0
    assert naive.files(root) and not naive.files(root, "*.tmp")
    assert maintenance.verify(root, False, lambda number: None).bad == []
    check(root)


@pytest.mark.parametrize(
    "dies",
    [
        "rename",
        *(pytest.param(call, marks=pytest.mark.more) for call in ("ftruncate", "pwritev", "mkdir")),
        *(
            pytest.param(call, marks=pytest.mark.slow)
            for call in ("utime", "pwrite", "fchmod", "unlink")
        ),
    ],
)
def test_an_engine_that_is_killed_leaves_nothing_that_stays(root, dies):
    """Killed between any two system calls of a write, three times in one root."""
    for seed in range(3):
        child = start(root, seed, 200, dies)
        assert child.stdout.readline() == "hangs\n"
        if dies in ("pwritev", "utime"):  # it holds no lock there, and others go on
            check(root)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=120)
        check(root)
    cache = DiskStore(root, Limits(LIMIT, None))
    folder = cache.blocks(naive.FINGERPRINT, naive.FACTS, "tenant-0")
    # Its start removes what the killed ones left, in a thread.
    naive.wait_until(lambda: not naive.files(root, "*.tmp"))
    naive.wait_until(lambda: cache.stats().bytes == naive.room(root))
    assert maintenance.verify(root, False, lambda number: None).bad == []
    for number in range(60):
        block = naive.block(number, 3000)
        outcome = folder.write(naive.key(number), block, time.time(), 0)
        assert outcome in (WriteResult.STORED, WriteResult.PRESENT)
        assert cache.stats().bytes == naive.room(root) <= LIMIT
    cache.close()


@pytest.mark.more
def test_engines_that_are_killed_at_any_time_keep_the_limit(root):
    child = start(root, 0, 100_000)
    for seed in range(1, 9):
        naive.wait_until(lambda: naive.files(root))
        other = start(root, seed, 100_000)
        time.sleep(0.05 * seed)  # whatever they do then
        check(root)
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=120)
        check(root)
        child = other
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=120)
    DiskStore(root, Limits(LIMIT, None)).close()  # its start removes what the others left
    check(root)
    assert not naive.files(root, "*.tmp")
    assert maintenance.verify(root, False, lambda number: None).bad == []
