# SPDX-License-Identifier: Apache-2.0
"""A Mac stays awake while an engine has requests; `caffeinate` is a double that runs until it is
ended."""

import os
import time

import pytest

from vllm_metal.engine.worker import keep_awake
from vllm_metal.engine.worker.keep_awake import LINGER, KeepAwake


class Timer:
    """Fires when the test says so."""

    made: "list[Timer]"

    def __init__(self, seconds, function):
        self.seconds, self.fire, self.cancelled = seconds, function, False
        Timer.made.append(self)

    def start(self):
        pass

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def awake(tmp_path, monkeypatch):
    Timer.made = []
    command = tmp_path / "caffeinate"
    notes = f'echo $$ >>{tmp_path}/pids\necho "$*" >>{tmp_path}/calls\n'
    command.write_text(f"#!/bin/sh\n{notes}exec /bin/sleep 600\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    awake = KeepAwake(Timer)
    yield awake
    awake.close()


def is_running(tmp_path):
    """Returns whether the newest double runs."""
    path = tmp_path / "pids"
    if not path.exists():
        return False
    try:
        os.kill(int(path.read_text().split()[-1]), 0)
    except ProcessLookupError:
        return False
    return True


def calls(tmp_path, count):
    """Returns the double's arguments after `count` calls."""
    path = tmp_path / "calls"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        time.sleep(0.01)
    return path.read_text().splitlines()


def test_it_runs_from_the_first_request_until_a_while_after_the_last(awake, tmp_path):
    awake.update(busy=False)
    assert not Timer.made
    awake.update(busy=True)
    awake.update(busy=True)
    assert calls(tmp_path, 1) == [f"-i -w {os.getpid()}"]
    awake.update(busy=False)
    awake.update(busy=False)
    (timer,) = Timer.made
    assert is_running(tmp_path) and timer.seconds == LINGER
    awake.update(busy=True)  # before the while is over
    assert timer.cancelled and is_running(tmp_path)
    awake.update(busy=False)
    Timer.made[-1].fire()
    assert not is_running(tmp_path)
    awake.update(busy=True)
    assert len(calls(tmp_path, 2)) == 2 and is_running(tmp_path)


def test_a_system_without_it_is_said_once(monkeypatch, tmp_path):
    said = []
    monkeypatch.setattr(keep_awake.logger, "warning", lambda *words: said.append(words))
    monkeypatch.setenv("PATH", str(tmp_path))
    awake = KeepAwake()
    for _ in range(3):
        awake.update(busy=True)
        awake.update(busy=False)
    awake.close()
    assert len(said) == 1
