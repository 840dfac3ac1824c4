# SPDX-License-Identifier: Apache-2.0
"""Ranks hear of each other's end: at once, after silence, and not where all is well."""

import queue
import signal
import socket
import subprocess
import threading
import time

import pytest

from vllm_metal.distributed import heartbeat

_GONE = 2**22 + 1  # no process has this number: it is above Linux's and macOS's largest


class Board:
    """What ranks in threads share; see `groups.share`."""

    def __init__(self, size):
        self._given = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank):
        def share(mine):
            self._given[rank] = mine
            self._barrier.wait(10)
            return self._given

        return share


@pytest.fixture
def three():
    """Heartbeats of three ranks; and what each loses, by rank."""
    board, joined = Board(3), {}

    def join(rank):
        joined[rank] = heartbeat.join(rank, 3, "127.0.0.1", board.of(rank), 10)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    lost = {rank: queue.Queue() for rank in range(3)}
    for rank, beat in joined.items():
        beat.pids = dict.fromkeys(range(3), _GONE)
        beat.lost, beat.interval_s, beat.silence_s = lost[rank].put, 0.05, 0.4
    yield joined, lost
    for beat in joined.values():
        beat.close()


def test_a_rank_whose_process_ends_is_heard_of(three):
    joined, lost = three
    joined[0].start()
    joined[1].start()
    joined[2].peers[0].close()  # as the system does for a process that was killed
    assert "rank 2" in lost[0].get(timeout=10)


def test_a_silent_rank_counts_as_dead(three):
    joined, lost = three
    joined[0].start()
    joined[1].start()  # and rank 2 keeps its connection, and sends nothing
    assert lost[0].get(timeout=10) == "rank 2 has been silent for 0.4 s"


def test_a_silent_rank_of_this_machine_is_killed(three):
    joined, lost = three
    with subprocess.Popen(["sleep", "60"]) as other:
        joined[0].pids = {2: other.pid}
        joined[0].start()
        joined[1].start()
        assert "rank 2" in lost[0].get(timeout=10)
        assert other.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("way", ["ends", "says nothing"])
def test_the_loss_of_a_rank_of_another_machine_ends_the_engine(three, way):
    """vLLM's executor would wait for its answer; one of this machine it hears of by itself."""
    joined, lost = three
    left = queue.Queue()
    joined[0].leave = lambda: left.put("left")
    joined[0].pids = {0: _GONE, 1: _GONE}
    joined[0].start()
    joined[1].start()
    if way == "ends":
        joined[2].peers[0].close()
    assert "rank 2" in lost[0].get(timeout=10)
    assert left.get(timeout=10) == "left"


def test_the_loss_of_a_rank_of_this_machine_leaves_the_engine_to_vllm(three):
    joined, lost = three
    left = queue.Queue()
    joined[0].leave = lambda: left.put("left")
    joined[0].start()
    joined[1].start()
    joined[2].peers[0].close()
    assert "rank 2" in lost[0].get(timeout=10)
    assert left.empty()


def test_beats_that_came_while_this_rank_had_no_processor_count(three, monkeypatch):
    """Its thread stands still for longer than a silence, between what it reads and what it says."""
    joined, lost = three

    class Stalling(heartbeat.selectors.DefaultSelector):
        def select(self, timeout=None):
            found = super().select(0)
            if threading.current_thread() not in others:
                time.sleep(1.2)
            return found

    joined[1].silence_s = joined[2].silence_s = 60.0
    joined[1].start()
    joined[2].start()
    others = set(threading.enumerate())
    monkeypatch.setattr(heartbeat.selectors, "DefaultSelector", Stalling)
    joined[0].silence_s = 1.0
    joined[0].start()
    with pytest.raises(queue.Empty):
        lost[0].get(timeout=4)


def test_the_end_of_rank_0_reaches_all(three):
    joined, lost = three
    joined[1].start()
    joined[2].start()
    for peer in joined[0].peers.values():
        peer.shutdown(socket.SHUT_RDWR)
    assert "rank 0" in lost[1].get(timeout=10)
    assert "rank 0" in lost[2].get(timeout=10)


def test_ranks_that_beat_and_end_as_they_should_are_not_lost(three):
    joined, lost = three
    for beat in joined.values():
        beat.interval_s, beat.silence_s = 1.0, 3.0  # a thread may wait long for its turn
        beat.start()
    with pytest.raises(queue.Empty):
        lost[0].get(timeout=4.0)
    for beat in joined.values():
        beat.close()
    assert all(each.empty() for each in lost.values())


def test_a_rank_that_ends_alone_takes_the_others_with_it(three):
    joined, lost = three
    for beat in joined.values():
        beat.start()
    joined[1].close()
    assert lost[0].get(timeout=10) == "rank 1 has ended"


def test_who_does_not_know_the_token_is_no_rank():
    shared, given = queue.Queue(), {}

    def share(mine):
        shared.put(mine)
        return [mine, None]

    def first():
        given[0] = heartbeat.join(0, 2, "127.0.0.1", share, 10)

    thread = threading.Thread(target=first)
    thread.start()
    port, token = shared.get(timeout=10)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"\0" * 20)
        assert stranger.recv(1) == b""
    second = heartbeat.join(1, 2, "127.0.0.1", lambda mine: [(port, token), mine], 10)
    thread.join(10)
    assert list(given[0].peers) == [1]
    second.close()
    given[0].close()
