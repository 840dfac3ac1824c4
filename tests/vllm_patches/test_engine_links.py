# SPDX-License-Identifier: Apache-2.0
"""A server and an engine on another machine each notice that the other is gone, or cut off."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from network.relay import relay
from vllm.v1.engine import core, core_client

from vllm_metal.vllm_patches import engine_links

#: An engine's link: says so, then does nothing.
ENGINE = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(b"ready")
time.sleep(600)
"""
NOTICED_S = 120.0  # a bound for a busy machine; heartbeats take 7


class Client(core_client.MPClient):
    """A server's client of engines on one socket, without engines of its own."""

    def __init__(self):
        self.ctx = zmq.Context()
        self.resources = core_client.BackgroundResources(ctx=self.ctx)
        self.input_socket = self.resources.input_socket = core_client.make_zmq_socket(
            self.ctx, "tcp://127.0.0.1:0", zmq.ROUTER, bind=True
        )
        self._finalizer = SimpleNamespace(alive=True)
        self.ended = threading.Event()

    @property
    def address(self):
        return self.input_socket.getsockopt(zmq.LAST_ENDPOINT).decode()

    def shutdown(self, timeout=None):
        self.ended.set()

    def close(self):
        self.input_socket.close()
        self.ctx.term()


@pytest.fixture
def client():
    engine_links.notice_lost_links()
    found = Client()
    yield found
    found.close()


def engine(address):
    return subprocess.Popen([sys.executable, "-c", ENGINE, address])


def start(client):
    """Watches, as vLLM does once its engines are ready."""
    assert client.input_socket.recv_multipart()[1] == b"ready"
    client.start_engine_core_monitor()


def test_a_killed_engine_is_noticed_and_a_stranger_is_not(client):
    process = engine(client.address)
    start(client)
    stranger = engine(client.address)
    assert client.input_socket.recv_multipart()[1] == b"ready"
    stranger.kill()
    stranger.wait()
    time.sleep(0.2)
    assert not client.ended.is_set()
    process.kill()
    assert client.ended.wait(NOTICED_S)
    assert client.resources.engine_dead
    process.wait()


@pytest.mark.more
def test_an_engine_behind_a_link_that_carries_nothing_is_noticed(client):
    with relay("127.0.0.1", int(client.address.rpartition(":")[2])) as between:
        process = engine(f"tcp://{between.address}")
        start(client)
        between.order("hold")
        assert client.ended.wait(NOTICED_S)
        process.kill()
        process.wait()


def test_an_engine_ends_with_its_server(monkeypatch):
    engine_links.end_without_a_server()
    ended = threading.Event()
    told = []
    monkeypatch.setattr(engine_links.os, "kill", lambda *asked: (told.append(asked), ended.set()))
    running = SimpleNamespace(
        tensor_ipc_receiver=None,
        _make_ready_response=lambda: None,
        vllm_config=SimpleNamespace(shutdown_timeout=60),
    )
    with zmq.Context() as context:
        server = context.socket(zmq.ROUTER)
        server.bind("tcp://127.0.0.1:0")
        address = server.getsockopt(zmq.LAST_ENDPOINT).decode()
        threading.Thread(
            target=core.EngineCoreProc.process_input_sockets,
            args=(running, [address], None, b"00", threading.Event()),
            daemon=True,
        ).start()
        assert server.recv_multipart()[0] == b"00"
        server.close(linger=0)
        assert ended.wait(NOTICED_S)
    assert told == [(os.getpid(), signal.SIGTERM)]
    assert running.vllm_config.shutdown_timeout == 0
