# SPDX-License-Identifier: Apache-2.0
"""Child processes that die, hang, or leave others behind."""

import time

import psutil
import pytest
from cli.doctor.conftest import ended

from vllm_metal.device.child import LIMITS, Child, run

SHORT = {**LIMITS, "answering": 1.0}


def test_what_a_child_says_is_kept_apart_from_what_it_prints(script):
    stages = []
    command = script(
        "import sys\n"
        "print('no end of line', end='')\n"
        "send_message(stage='answering', tokens=[1, 2])\n"
        "print('to stderr', file=sys.stderr)\n"
        "send_message(tokens=[3])\n"
    )
    found = run(command, stages.append)
    assert found.ok
    assert stages == ["answering"]
    assert found.reported == {"stage": "answering", "tokens": [3]}
    assert set(found.lines) == {"no end of line", "to stderr"}


def test_a_signal_is_named_with_what_was_going_on(script):
    command = script(
        "import os, signal\n"
        "send_message(stage='shutting down')\n"
        "print('last words', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    found = run(command, print)
    assert not found.ok
    assert found.exit_reason == "ended by signal 11 (SIGSEGV) while shutting down"
    assert found.lines == ("last words",)


def test_an_exit_status_comes_with_the_error_that_caused_it():
    lines = (
        "(EngineCore pid=7) some.module.ValueError: too little memory",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    )
    found = ended(1, lines, stage="loading the model")
    assert found.exit_reason == (
        "ended with exit status 1 while loading the model: ValueError: too little memory"
    )
    assert ended(1, ("one line, and no more",)).exit_reason.endswith(": one line, and no more")


def test_a_hang_is_ended_with_all_that_was_started(script):
    command = script(
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "send_message(stage='answering', other=other.pid)\n"
        "time.sleep(600)\n"
    )
    found = run(command, print, limits=SHORT)
    assert found.status is None
    assert found.exit_reason.startswith("hung while answering and was ended after")
    assert is_gone(found.reported["other"])


def test_what_outlives_its_parent_is_ended_too(script):
    command = script(
        "import subprocess, sys\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "send_message(other=other.pid)\n"
    )
    found = run(command, print)
    assert found.ok
    assert is_gone(found.reported["other"])


def test_an_interrupted_doctor_leaves_nothing(script):
    command = script("import os, time\nsend_message(me=os.getpid())\ntime.sleep(600)\n")
    with pytest.raises(KeyboardInterrupt), Child(command) as child:
        assert child.message(LIMITS["starting"]) is not None
        raise KeyboardInterrupt
    assert is_gone(child.reported["me"])


def is_gone(pid: int) -> bool:
    """Returns whether a process ends within a minute; zombies count as ended."""
    for _ in range(1200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
