# SPDX-License-Identifier: Apache-2.0
"""Ranks detect each other's end, at once or after silence, without false alarms."""

import itertools
import queue
import signal
import socket
import subprocess
import threading
from types import SimpleNamespace

import pytest

from vllm_metal.engine.distributed import heartbeat

_GONE = 2**22 + 1  # no process has this number: it is above Linux's and macOS's largest
_LIMIT_S = 60  # of every wait; only a broken heartbeat takes so long


class Clock:
    """A clock set by the test; also records which rank received something."""

    def __init__(self):
        self.now, self.heard = 0.0, queue.Queue()

    def wait_for_beats(self, *ranks):
        assert sorted(self.heard.get(timeout=_LIMIT_S) for _ in ranks) == sorted(ranks)


@pytest.fixture
def clock(monkeypatch):
    clock, hear = Clock(), heartbeat.Heartbeat.hear

    def noting(self, rank, heard):
        lost = hear(self, rank, heard)
        clock.heard.put(rank)
        return lost

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(heartbeat.Heartbeat, "hear", noting)
    return clock


class Board:
    """State shared by ranks in threads; see `groups.share`."""

    def __init__(self, size):
        self._given = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank):
        def share(mine):
            self._given[rank] = mine
            self._barrier.wait(_LIMIT_S)
            return self._given

        return share


@pytest.fixture
def three(clock):
    """Heartbeats of three ranks, and the ranks each lost. Time only passes by the clock."""
    board, joined = Board(3), {}

    def join(rank):
        joined[rank] = heartbeat.join(rank, 3, "127.0.0.1", board.of(rank), _LIMIT_S)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost = {rank: queue.Queue() for rank in range(3)}
    for rank, beat in joined.items():
        beat.pids = dict.fromkeys(range(3), _GONE)
        beat.lost, beat.interval_s, beat.silence_s = lost[rank].put, 60.0, 240.0
    yield joined, lost
    for beat in joined.values():
        beat.close()


def fall_silent(joined, clock):
    """Rank 0 watches, rank 1 sends beats, and rank 2 only keeps its connection."""
    joined[0].start()
    for _ in range(3):
        joined[1].peers[0].send(b".")
        clock.wait_for_beats(1)
        clock.now += 90.0


def test_a_rank_whose_process_ends_is_heard_of(three):
    joined, lost = three
    joined[0].start()
    joined[1].start()
    joined[2].peers[0].close()  # as the system does for a process that was killed
    assert "rank 2" in lost[0].get(timeout=_LIMIT_S)


def test_a_silent_rank_counts_as_dead(three, clock):
    joined, lost = three
    fall_silent(joined, clock)
    assert lost[0].get(timeout=_LIMIT_S) == "rank 2 has been silent for 240 s"


def test_a_silent_rank_of_this_machine_is_killed(three, clock):
    joined, lost = three
    with subprocess.Popen(["sleep", "600"]) as other:
        joined[0].pids = {2: other.pid}
        fall_silent(joined, clock)
        assert "rank 2" in lost[0].get(timeout=_LIMIT_S)
        assert other.wait(_LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("way", ["ends", "says nothing"])
def test_the_loss_of_a_rank_of_another_machine_ends_the_engine(three, clock, way):
    """vLLM's executor notices only ranks of this machine and would wait."""
    joined, lost = three
    left = queue.Queue()
    joined[0].leave = lambda: left.put("left")
    joined[0].pids = {0: _GONE, 1: _GONE}
    if way == "ends":
        joined[0].start()
        joined[2].peers[0].close()
    else:
        fall_silent(joined, clock)
    assert "rank 2" in lost[0].get(timeout=_LIMIT_S)
    assert left.get(timeout=_LIMIT_S) == "left"


def test_the_loss_of_a_rank_of_this_machine_leaves_the_engine_to_vllm(three):
    joined, lost = three
    left = queue.Queue()
    joined[0].leave = lambda: left.put("left")
    joined[0].start()
    joined[1].start()
    joined[2].peers[0].close()
    assert "rank 2" in lost[0].get(timeout=_LIMIT_S)
    assert left.empty()


def test_beats_that_came_while_this_rank_had_no_processor_count(three, clock, monkeypatch):
    """Its thread stops, between reading and judging, for longer than a silence."""
    joined, lost = three
    rounds, enough = itertools.count(), threading.Event()

    class Stalling(heartbeat.selectors.DefaultSelector):
        def select(self, timeout=None):
            found = super().select(0)
            clock.now += 300.0
            for rank in (1, 2):
                joined[rank].peers[0].send(b".")
            if next(rounds) == 5:
                enough.set()
            return found

    monkeypatch.setattr(heartbeat.selectors, "DefaultSelector", Stalling)
    joined[0].start()
    assert enough.wait(_LIMIT_S) and lost[0].empty()


def test_the_end_of_rank_0_reaches_all(three):
    joined, lost = three
    joined[1].start()
    joined[2].start()
    for peer in joined[0].peers.values():
        peer.shutdown(socket.SHUT_RDWR)
    assert "rank 0" in lost[1].get(timeout=_LIMIT_S)
    assert "rank 0" in lost[2].get(timeout=_LIMIT_S)


def test_ranks_that_beat_and_end_as_they_should_are_not_lost(three, clock):
    joined, lost = three
    for beat in joined.values():
        beat.start()
    for _ in range(7):  # each is silent for a minute at a time, and for more than 240 s together
        clock.wait_for_beats(0, 0, 1, 2)
        clock.now += 60.0
    for beat in joined.values():
        beat.close()
    assert all(each.empty() for each in lost.values())


def test_a_rank_that_ends_alone_takes_the_others_with_it(three):
    joined, lost = three
    for beat in joined.values():
        beat.interval_s = 0.05
        beat.start()
    joined[1].close()
    assert lost[0].get(timeout=_LIMIT_S) == "rank 1 has ended"


def test_who_does_not_know_the_token_is_no_rank():
    shared, given = queue.Queue(), {}

    def share(mine):
        shared.put(mine)
        return [mine, None]

    def first():
        given[0] = heartbeat.join(0, 3, "127.0.0.1", share, _LIMIT_S)

    thread = threading.Thread(target=first)
    thread.start()
    port, token = shared.get(timeout=_LIMIT_S)
    # Some say nothing, or not all of it; one is no other rank, though it knows the token.
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    silent[-1].sendall(token)
    for greeting in (b"\0" * 20, token + bytes(4), token + b"\0\0\0\3"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
            assert stranger.recv(1) == b""
    assert silent[0].recv(1) == b""  # the oldest has given way
    silent[-1].sendall(b"\0\0\0\2")  # a rank whose greeting came in pieces
    second = heartbeat.join(1, 3, "127.0.0.1", lambda mine: [(port, token), mine], _LIMIT_S)
    thread.join(_LIMIT_S)
    assert sorted(given[0].peers) == [1, 2]
    second.close()
    given[0].close()
    for stranger in silent:
        stranger.close()
