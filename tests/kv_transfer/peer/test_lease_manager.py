# SPDX-License-Identifier: Apache-2.0
"""Messages of the lease manager to a server, and their timing."""

import threading

import pytest
from kv_transfer.peer.engines import wait_until

from vllm_metal.kv_transfer.peer import lease_manager
from vllm_metal.kv_transfer.peer.lease_manager import LeaseManager
from vllm_metal.kv_transfer.peer.limits import Timeouts
from vllm_metal.kv_transfer.peer.messages import Release, Renew


class Server:
    """Records its messages; a test may block it."""

    def __init__(self):
        self.told = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __call__(self, message):
        self.told.append(message)
        self.goes_on.wait()

    def released(self):
        return [sorted(message.keys) for message in self.told if isinstance(message, Release)]

    def num_renewed(self):
        return sum(isinstance(message, Renew) for message in self.told)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def make_manager(ends, server, clock):
    def make(renew):
        keeper = LeaseManager(server, Timeouts(renew=renew, longest_lease=300.0), clock)
        ends.append(keeper)
        return keeper

    return make


def want(keeper, *keys):
    keeper.want(keys)
    keeper.start_renewing()


def test_a_page_is_released_when_the_last_who_asked_lets_go(make_manager, server):
    keeper = make_manager(renew=60)
    want(keeper, b"a", b"b", b"c")
    want(keeper, b"a")
    keeper.not_found([b"c"])
    keeper.release([b"a", b"b", b"never"])
    wait_until(lambda: server.released() == [[b"b"]])
    keeper.release([b"a"])
    keeper.release([b"a", b"c"])
    wait_until(lambda: server.released() == [[b"b"], [b"a"]])
    assert server.num_renewed() == 0


def test_what_is_wanted_again_is_not_released(make_manager, server):
    keeper = make_manager(renew=60)
    server.goes_on.clear()
    want(keeper, b"a", b"b", b"c")
    keeper.release([b"a"])
    wait_until(lambda: server.told)  # it is busy with the first
    keeper.release([b"b", b"c"])
    want(keeper, b"b")
    server.goes_on.set()
    wait_until(lambda: server.released() == [[b"a"], [b"c"]])


def test_leases_are_renewed_only_while_something_is_wanted(make_manager, server, clock):
    keeper = make_manager(renew=0.01)
    want(keeper, b"a", b"b")
    wait_until(lambda: server.num_renewed() >= 3)
    clock.now += 299
    want(keeper, b"b")
    keeper.release([b"b"])
    clock.now += 1  # a was forgotten; b was asked for again a second ago
    wait_until(lambda: server.released() == [[b"a"]])
    renewed = server.num_renewed()
    wait_until(lambda: server.num_renewed() > renewed)
    keeper.release([b"b"])
    wait_until(lambda: server.released() == [[b"a"], [b"b"]])
    renewed = server.num_renewed()
    want(keeper)
    keeper.close()
    assert server.num_renewed() <= renewed + 1  # one may have been on its way


def test_releases_are_cut_into_messages(monkeypatch, make_manager, server):
    monkeypatch.setattr(lease_manager, "MAX_KEYS", 4)
    keeper = make_manager(renew=60)
    keys = [bytes([number]) for number in range(10)]
    keeper.want(keys)
    keeper.release(keys)
    keeper.start_renewing()
    wait_until(lambda: len(server.told) == 3)
    assert sorted(map(len, server.released())) == [2, 4, 4]
    assert sorted(key for part in server.released() for key in part) == keys


def test_closing_without_a_thread_is_nothing(make_manager, server):
    keeper = make_manager(renew=0.01)
    keeper.want([b"a"])
    keeper.not_found([b"a"])
    keeper.close()
    keeper.start_renewing()
    keeper.release([b"a"])
    assert server.told == []
