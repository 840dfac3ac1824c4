# SPDX-License-Identifier: Apache-2.0
"""A peer's process: commands, failures, and its end."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from _peers_process import Peer, PeerError, Recorder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = f"""
import os, subprocess, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from _peers_process import Recorder, answer_commands

class Engine:
    def __init__(self, fails=False):
        print("noise of a library")
        os.system("echo noise of another process")
        if fails:
            raise RuntimeError("no such model")
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self.about = {{name.lower(): os.environ.get(name) for name in ("COLOR", "SHAPE")}}
        self.about["child"] = self.child.pid

    def run(self, prompts, max_tokens):
        print("more noise")
        recorder = Recorder(len(prompts))
        for number, prompt in enumerate(prompts):
            recorder.note(number, prompt[:max_tokens])
        return recorder.run()

    def fail(self):
        raise ValueError("as asked")

    def leave(self):
        os._exit(3)

answer_commands(Engine)
"""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    monkeypatch.setenv("SHAPE", "round")
    peer = start(tmp_path)
    peer.await_ready()
    yield peer
    peer.close()


def start(folder: Path, **options: object) -> Peer:
    script = folder / "engine.py"
    script.write_text(SCRIPT)
    return Peer("toy", script, options, {"COLOR": "green", "SHAPE": None}, folder / "log")


def test_answers_are_apart_from_what_libraries_print(peer: Peer, tmp_path: Path) -> None:
    assert (peer.about["color"], peer.about["shape"]) == ("green", None)
    run = peer.run([[5, 6, 7], [8, 9, 10]], 2)
    assert run.tokens == [[5, 6], [8, 9]]
    assert 0 <= run.first[0] == run.last[0] <= run.first[1]
    assert "more noise" in (tmp_path / "log").read_text()
    assert peer.cpu_seconds() > 0


def test_an_answer_of_another_length_is_an_error(peer: Peer) -> None:
    with pytest.raises(PeerError, match="toy answered"):
        peer.run([[5, 6, 7]], 9)


def test_a_failed_command_is_an_error_and_the_peer_goes_on(peer: Peer) -> None:
    with pytest.raises(PeerError, match="ValueError: as asked"):
        peer.ask("fail")
    assert peer.run([[1, 2]], 1).tokens == [[1]]


def test_a_peer_that_ends_is_an_error(peer: Peer) -> None:
    with pytest.raises(PeerError, match="it exited: 3"):
        peer.ask("leave")
    with pytest.raises(PeerError, match="it exited: 3"):
        peer.ask("fail")


def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    peer = start(tmp_path, fails=True)
    with pytest.raises(PeerError, match=r"no such model(.|\n)*log ends(.|\n)*in __init__"):
        peer.await_ready()
    peer.close()


def test_close_ends_what_the_peer_started(tmp_path: Path) -> None:
    peer = start(tmp_path)
    peer.await_ready()
    child = psutil.Process(int(str(peer.about["child"])))
    peer.close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_recorder_notes_when_tokens_came(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 12.5, 14.0])
    monkeypatch.setattr("_peers_process.time.perf_counter", lambda: next(times))
    recorder = Recorder(2)
    recorder.note(1, [4])
    recorder.note(0, [5])
    recorder.note(1, [6, 7])
    run = recorder.run()
    assert (run.first, run.last, run.tokens) == ([2.5, 1.0], [2.5, 4.0], [[5], [4, 6, 7]])
    assert run.throughput == 1.0
