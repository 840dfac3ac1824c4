# SPDX-License-Identifier: Apache-2.0
"""A server and a remote engine each detect that the other is gone or unreachable."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import zmq
from network.relay import relay
from vllm.v1.engine import core, core_client, utils
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_metal.patches.vllm_patches import engine_links

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
    """A server's client of engines on one socket, without engines."""

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
    """Starts the monitor, as vLLM does once its engines are ready."""
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


class Sync(core_client.SyncMPClient):
    """An `LLM`'s client, without an engine."""

    def __init__(self):
        self.resources = SimpleNamespace(engine_dead=False, engine_manager=None)
        self._finalizer = SimpleNamespace(detach=lambda: None)
        self.utility_results, self.outputs_queue = {}, queue.Queue()
        self.sent = threading.Event()

    def _send_input(self, request_type, request):
        self.ensure_alive()
        self.sent.set()


@pytest.mark.parametrize("wait", [Sync.reset_mm_cache, Sync.get_output])
def test_who_waits_for_an_engine_that_ends_is_told(wait):
    """An `LLM` waits like this if the user interrupts it at the end of its start."""
    engine_links.notice_lost_links()
    client, raised = Sync(), queue.Queue()

    def call():
        try:
            wait(client)
        except EngineDeadError as error:
            raised.put(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    if wait is Sync.reset_mm_cache:
        assert client.sent.wait(NOTICED_S)
    client.resources.engine_dead = True
    client.shutdown()
    assert raised.get(timeout=240)


@pytest.fixture
def handshake(monkeypatch):
    """Makes an engine's handshake end as specified; returns the socket of its first message."""
    monkeypatch.setattr(core_client, "zmq", zmq)

    def ended(error, finished):
        def wait(*args):
            if error is not None:
                raise error

        monkeypatch.setattr(utils, "wait_for_engine_startup", wait)
        engine_links.notice_engines_that_end_early()
        launch = SimpleNamespace(engine_manager=SimpleNamespace(finished_procs=lambda: finished))
        if error is None:
            utils.wait_for_engine_startup(launch)
        else:
            with pytest.raises(type(error)):
                utils.wait_for_engine_startup(launch)
        return core_client.zmq.Socket(zmq.Context.instance(), zmq.PULL)

    return ended


@pytest.mark.parametrize(
    ("error", "finished", "told"),
    [
        (None, {"EngineCore": 1}, RuntimeError),
        (KeyboardInterrupt(), {}, KeyboardInterrupt),  # which vLLM drops
    ],
)
def test_a_client_does_not_wait_for_an_engine_that_has_ended(handshake, error, finished, told):
    with handshake(error, finished) as socket, pytest.raises(told):
        socket.poll(600_000)


def test_a_client_waits_for_an_engine_that_starts(handshake):
    with handshake(None, {}) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        assert socket.poll(1) == 0
        with zmq.Context.instance().socket(zmq.PUSH) as engine:
            engine.connect(f"tcp://127.0.0.1:{port}")
            engine.send(b"ready")
            assert socket.poll() == zmq.POLLIN
            assert socket.recv() == b"ready"
