# SPDX-License-Identifier: Apache-2.0
"""Notices that a link between a server and its engine is gone, at either end.

vLLM watches the processes that it has started. Of an engine on another machine it hears nothing
more when that one is killed or its link is cut, and its requests wait for ever; such an engine
waits for a server that is gone. ZeroMQ tells of both: of a closed connection at once, and of one
that answers no heartbeats after some seconds. An engine on the server's own machine outlives a
server that is killed, and keeps the memory that the next one wants; its parent's end tells of that.
"""

# Remove when vLLM notices lost remote engines, and its engines end with their server. Read
# against vLLM 0.33.

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from queue import Queue
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

import zmq
from vllm.logger import init_logger
from zmq.utils.monitor import recv_monitor_message

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.v1.engine.core_client import MPClient

logger = init_logger(__name__)

#: Milliseconds between heartbeats, and without an answer until a link counts as cut: 7 s in all.
#: ZeroMQ's own threads answer them, however long a step or a start takes.
HEARTBEATS: dict[int, int] = {zmq.HEARTBEAT_IVL: 2000, zmq.HEARTBEAT_TIMEOUT: 5000}
_LOOK_MS = 500  # between looks at an engine that starts
_ENDS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_lost: ContextVar[Callable[[str], None] | None] = ContextVar("lost", default=None)


def notice_lost_links() -> None:
    """Has servers notice lost engines on other machines; call it once vLLM is loaded.

    A server ends then, as it does where an engine of its own machine dies: its clients get vLLM's
    error at once.
    """
    from vllm.v1.engine import core_client

    replace(core_client, "make_zmq_socket", _beating)
    replace(core_client.MPClient, "start_engine_core_monitor", _watching_engines)
    replace(core_client.MPClient, "shutdown", _telling_who_waits)


def notice_engines_that_end_early() -> None:
    """Has a client notice an engine that ends as it starts; call it once vLLM is loaded.

    Behind the handshake vLLM waits for an engine's first message, up to ten minutes, and looks at
    nothing meanwhile: neither at the engine's process nor, where another thread gets it, at Ctrl-C.
    """
    from vllm.v1.engine import core_client, utils

    replace(utils, "wait_for_engine_startup", _knowing_the_engines)
    core_client.zmq = _Zmq("zmq")


def _knowing_the_engines(wait: Callable[..., None], *args: Any, **options: Any) -> None:
    launch = options.get("launch", args[-1] if args else None)
    _engines[:] = [getattr(launch, "engine_manager", None)]
    _interrupted.clear()
    try:
        wait(*args, **options)
    except KeyboardInterrupt:  # which vLLM drops, and then waits for the engine
        _interrupted.append(True)
        raise


_engines: list[Any] = []  # what has started those that a client waits for
_interrupted: list[bool] = []


class _AnySocket(type(zmq.Socket)):  # type: ignore[misc]
    """A client asks of its sockets whether they are any: it has made them elsewhere."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, zmq.Socket)


class _Waiting(zmq.Socket[bytes], metaclass=_AnySocket):
    """A socket that looks at its engines while it waits."""

    def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:
        """As `zmq.Socket.poll`.

        Raises:
            RuntimeError: an engine has ended; the message is vLLM's.
            KeyboardInterrupt: the start was interrupted before.
        """
        if _interrupted:
            _interrupted.clear()
            raise KeyboardInterrupt
        left = timeout
        while left is None or left > 0:
            part = _LOOK_MS if left is None else min(left, _LOOK_MS)
            if events := super().poll(part, flags):
                return events
            for manager in _engines:
                ask = getattr(manager, "finished_procs", None)  # Ray's managers have none
                if ask is not None and (finished := ask()):
                    raise RuntimeError(
                        "Engine core initialization failed. See root cause above. "
                        f"Failed core proc(s): {finished}"
                    )
            left = None if left is None else left - part
        return 0


class _Zmq(ModuleType):
    """ZeroMQ, as the client of an engine sees it."""

    Socket = _Waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)


def end_without_a_server() -> None:
    """Has engines end whose server is gone or out of reach; call it in the engine's process.

    The launcher of an engine on another machine ends with it, and what runs the launcher may start
    it anew: it then waits for a server. An engine ends as well when the process is gone that has
    started it: the server, the launcher, or an `LLM`'s.
    """
    from vllm.v1.engine import core

    replace(core, "make_zmq_socket", _beating)
    replace(core.EngineCoreProc, "process_input_sockets", _watching_the_server)


def _beating(make: Callable[..., Any], context: Any, path: str, *args: Any, **options: Any) -> Any:
    """A socket whose links over the network have heartbeats, and are watched if somebody asks."""
    if not path.startswith("tcp://"):
        return make(context, path, *args, **options)
    with _sockets_with(context, HEARTBEATS):
        socket = make(context, path, *args, **options)
    if (lost := _lost.get()) is not None:
        _watch(context, socket, zmq.EVENT_DISCONNECTED, lambda: lost(path))
    return socket


@contextmanager
def _sockets_with(context: zmq.Context[Any], options: dict[int, int]) -> Iterator[None]:
    """Options of sockets that are made meanwhile; they count from a socket's first address on."""
    for option, value in options.items():
        context.setsockopt(option, value)
    try:
        yield
    finally:
        for option in options:
            context.sockopts.pop(option, None)


def _watch(
    context: zmq.Context[Any], socket: zmq.Socket[Any], events: int, lost: Callable[[], None]
) -> None:
    """Calls `lost`, in a thread of its own, once a link ends that was there before.

    Args:
        context: of the socket, and no asyncio's.
        socket: its thread calls this. The watch ends with it.
        events: whether new links are to be told apart.
        lost: is called at most once.
    """
    address = f"inproc://{uuid.uuid4().hex}"
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.connect(address)
    Thread(target=_follow, args=(monitor, lost), daemon=True, name="EngineLinks").start()


def _follow(monitor: zmq.Socket[Any], lost: Callable[[], None]) -> None:
    strangers: set[int] = set()  # links that came later: no engine's
    with monitor, suppress(zmq.ZMQError):  # the context has ended
        while True:
            event = recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                return
            if event["event"] == zmq.EVENT_ACCEPTED:
                strangers.add(event["value"])
            elif event["value"] in strangers:
                strangers.discard(event["value"])
            else:
                break
        lost()


def _watching_engines(start: Callable[[MPClient], None], self: MPClient) -> None:
    """All engines have told that they are ready, each over a link of its own."""
    start(self)
    client, resources = weakref.ref(self), self.resources
    assert resources.input_socket is not None
    endpoint = resources.input_socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    if endpoint.startswith(b"tcp://"):
        _watch(resources.ctx, resources.input_socket, _ENDS, lambda: _lose_engines(client()))


def _telling_who_waits(
    shutdown: Callable[..., None], self: Any, *args: Any, **options: Any
) -> None:
    """Ends calls that wait for an answer of the engine: none comes any more.

    vLLM tells calls that are made from now on, and an event loop's. A call that was sent shortly
    before the engine ended, or a step that an `LLM` waits for, would wait for ever.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    shutdown(self, *args, **options)
    for future in list(getattr(self, "utility_results", {}).values()):
        if isinstance(future, Future) and not future.done():
            with suppress(InvalidStateError):  # the answer came meanwhile
                future.set_exception(EngineDeadError())
    outputs = getattr(self, "outputs_queue", None)
    if isinstance(outputs, Queue):
        outputs.put_nowait(EngineDeadError())


def _lose_engines(client: Any) -> None:
    """As vLLM does where an engine of this machine dies, but clients are told first.

    The engines of this machine may take some seconds to end.

    Args:
        client: vLLM's `MPClient`; None: it is gone, too.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    if client is None or not client._finalizer.alive or client.resources.engine_dead:
        return
    logger.error(
        "An engine process ended, or the connection to its machine is lost: shutting "
        "down the server"
    )
    client.resources.engine_dead = True
    if (task := client.resources.output_queue_task) is not None:
        error = EngineDeadError()
        task.get_loop().call_soon_threadsafe(client.outputs_queue.put_nowait, error)
    client.shutdown()


def _watching_the_server(
    process: Callable[..., None], self: Any, *args: Any, **options: Any
) -> None:
    Thread(target=_end_with_parent, args=(self,), daemon=True, name="EngineParent").start()
    token = _lost.set(partial(_end_without_server, self))
    try:
        process(self, *args, **options)
    finally:
        _lost.reset(token)


def _end_with_parent(engine: Any) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        _end(engine, "The process that started this engine is gone")


def _end_without_server(engine: Any, address: str) -> None:
    _end(engine, f"The server at {address} is gone, or the connection to it is lost")


def _end(engine: Any, reason: str) -> None:
    """Ends this process as its launcher would; nobody waits for what it computes."""
    logger.error("%s: shutting down the engine", reason)
    engine.vllm_config.shutdown_timeout = 0
    os.kill(os.getpid(), signal.SIGTERM)
