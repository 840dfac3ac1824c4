# SPDX-License-Identifier: Apache-2.0
"""The ledger has one holder at a time, and detects damage."""

import subprocess
import sys
import threading

import pytest

from vllm_metal.kv_transfer.disk import ledger as ledger_module
from vllm_metal.kv_transfer.disk.ledger import UNKNOWN, Balance, Ledger, read_balance

BALANCE = Balance(bytes=4096 * 17, day=739_000, written=12345)


def test_what_is_entered_is_what_others_read(root):
    ledger, other = Ledger(root), Ledger(root)
    with ledger.locked() as balance:
        assert balance is None
        ledger.write_balance(BALANCE)
    assert read_balance(root) == BALANCE
    with other.locked() as balance:
        assert balance == BALANCE
    ledger.close()
    other.close()


def test_there_is_none_in_a_folder_without_one(root):
    assert read_balance(root) is None


def test_every_flipped_bit_and_other_length_is_known(root):
    ledger = Ledger(root)
    with ledger.locked():
        ledger.write_balance(BALANCE)
    path = root / "ledger"
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert read_balance(root) is None, f"bit {bit}"
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert read_balance(root) is None, length
    with ledger.locked() as balance:
        assert balance is None
    ledger.close()


def test_one_thread_at_a_time(root):
    ledger = Ledger(root)
    with ledger.locked():
        ledger.write_balance(Balance(0, 0, 0))

    def count():
        for _ in range(200):
            with ledger.locked() as balance:
                ledger.write_balance(balance.plus(1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_balance(root).bytes == 800
    ledger.close()


COUNT = """
import sys
from pathlib import Path
from vllm_metal.kv_transfer.disk.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
for _ in range(500):
    with ledger.locked() as balance:
        ledger.write_balance(balance.plus(1))
"""


def test_one_process_at_a_time(root):
    ledger = Ledger(root)
    with ledger.locked():
        ledger.write_balance(Balance(0, 0, 0))
    children = [subprocess.Popen([sys.executable, "-c", COUNT, root]) for _ in range(2)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    assert read_balance(root).bytes == 1000
    ledger.close()


def test_a_lock_that_is_never_released_is_an_error(root, monkeypatch):
    monkeypatch.setattr(ledger_module, "LOCK_TIMEOUT", 0.05)
    ledger, other = Ledger(root), Ledger(root)
    with other.locked(), pytest.raises(TimeoutError), ledger.locked():
        pass
    with ledger.locked():
        pass
    ledger.close()
    other.close()


def test_a_ledger_that_was_removed_is_made_again(root):
    ledger = Ledger(root)
    with ledger.locked():
        ledger.write_balance(BALANCE)
    (root / "ledger").unlink()
    with ledger.locked() as balance:
        assert balance is None
        ledger.write_balance(BALANCE)
    assert read_balance(root) == BALANCE
    ledger.close()


def test_bytes_are_never_negative():
    assert Balance(10, 0, 0).plus(-20).bytes == 0
    assert not UNKNOWN.plus(-(10**15)).is_known
