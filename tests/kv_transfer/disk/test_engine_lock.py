# SPDX-License-Identifier: Apache-2.0
"""An engine counts as alive exactly while it holds its lock."""

import signal
import subprocess
import sys

from vllm_metal.kv_transfer.disk.engine_lock import EngineLock, running_engines

HOLD = """
import sys, time
from pathlib import Path
from vllm_metal.kv_transfer.disk.engine_lock import EngineLock
lock = EngineLock(Path(sys.argv[1]))
print(lock.name, flush=True)
time.sleep(600)
"""


def test_an_engine_lives_until_it_is_closed(root):
    one, two = EngineLock(root), EngineLock(root)
    assert running_engines(root) == {one.name, two.name}
    assert one.is_known()
    one.close()
    assert running_engines(root) == {two.name}
    two.close()
    assert running_engines(root) == set()


def test_an_engine_lives_until_it_is_killed(root):
    child = subprocess.Popen([sys.executable, "-c", HOLD, root], stdout=subprocess.PIPE, text=True)
    held = child.stdout.readline().strip()
    assert held.startswith(f"{child.pid}-")
    assert held in running_engines(root)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert running_engines(root) == set()
    assert not list((root / "engines").iterdir())


def test_a_lock_whose_file_is_gone_is_of_no_use(root):
    lock = EngineLock(root)
    (root / "engines" / lock.name).unlink()
    assert not lock.is_known()
    lock.close()


def test_other_files_stay(root):
    EngineLock(root).close()
    (root / "engines" / ".DS_Store").write_text("")
    assert running_engines(root) == set()
    assert (root / "engines" / ".DS_Store").exists()
