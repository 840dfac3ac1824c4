# SPDX-License-Identifier: Apache-2.0
"""Detects a lost link between a server and its engine, at either end.

vLLM only watches processes that it started. If an engine on another machine is killed or its link
is cut, its requests wait forever; if the server is gone, such an engine waits forever. ZeroMQ
reports both: a closed connection at once, missing heartbeats after some seconds. An engine on the
server's machine outlives a killed server and keeps the memory that the next server needs; it
watches its parent process.
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
_LOOK_MS = 500  # between checks of a starting engine
_ENDS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_lost: ContextVar[Callable[[str], None] | None] = ContextVar("lost", default=None)


def notice_lost_links() -> None:
    """Makes servers detect lost engines on other machines; call it once vLLM is loaded.

    The server then ends, as it does if a local engine dies: clients get vLLM's error at once.
    """
    from vllm.v1.engine import core_client

    replace(core_client, "make_zmq_socket", _with_heartbeats)
    replace(core_client.MPClient, "start_engine_core_monitor", _watch_engines)
    replace(core_client.MPClient, "shutdown", _fail_pending_calls)


def notice_engines_that_end_early() -> None:
    """Makes a client detect an engine that ends during its start; call it once vLLM is loaded."""
    # After the handshake vLLM waits up to ten minutes for an engine's first message, and checks
    # neither the engine's process nor, if another thread gets it, Ctrl-C.
    from vllm.v1.engine import core_client, utils

    replace(utils, "wait_for_engine_startup", _remember_engines)
    core_client.zmq = _Zmq("zmq")


def _remember_engines(wait: Callable[..., None], *args: Any, **options: Any) -> None:
    launch = options.get("launch", args[-1] if args else None)
    _engines[:] = [getattr(launch, "engine_manager", None)]
    _interrupted.clear()
    try:
        wait(*args, **options)
    except KeyboardInterrupt:  # vLLM drops it, and then waits for the engine
        _interrupted.append(True)
        raise


_engines: list[Any] = []  # managers of the engines that a client waits for
_interrupted: list[bool] = []


class _AnySocket(type(zmq.Socket)):  # type: ignore[misc]
    # vLLM's client checks its sockets with `isinstance(…, zmq.Socket)`, where `zmq` is _Zmq, but
    # some were made elsewhere, as plain `zmq.Socket`.
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, zmq.Socket)


class _Waiting(zmq.Socket[bytes], metaclass=_AnySocket):
    """A socket that checks its engines while it waits."""

    def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:
        """Works like `zmq.Socket.poll`.

        Raises:
            RuntimeError: an engine has ended; the message is vLLM's.
            KeyboardInterrupt: the start was interrupted earlier.
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
    Socket = _Waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(zmq, name)


def end_without_a_server() -> None:
    """Makes engines end if their server is gone or unreachable; call it in the engine's process."""
    # The launcher of an engine on another machine ends with the engine, and a supervisor may
    # restart it: it then waits for a server. An engine also ends when the process that started it
    # is gone: the server, the launcher, or an `LLM`'s.
    from vllm.v1.engine import core

    replace(core, "make_zmq_socket", _with_heartbeats)
    replace(core.EngineCoreProc, "process_input_sockets", _watch_server)


def _with_heartbeats(
    make: Callable[..., Any], context: Any, path: str, *args: Any, **options: Any
) -> Any:
    """Makes a socket by `make`, with heartbeats if `path` is a network address.

    When such a socket disconnects, calls what `_lost` holds, if anything, with `path`.
    """
    if not path.startswith("tcp://"):
        return make(context, path, *args, **options)
    with _sockets_with(context, HEARTBEATS):
        socket = make(context, path, *args, **options)
    if (lost := _lost.get()) is not None:
        _watch(context, socket, zmq.EVENT_DISCONNECTED, lambda: lost(path))
    return socket


@contextmanager
def _sockets_with(context: zmq.Context[Any], options: dict[int, int]) -> Iterator[None]:
    # A socket takes these options from its context, for the addresses it binds or connects later.
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
    """Calls `lost` once, in a thread of its own, when a link that existed before ends.

    Call it in the socket's thread; the watch ends with the socket. `context` is the socket's and
    must not be an asyncio context. `events` says whether new links can be told apart.
    """
    address = f"inproc://{uuid.uuid4().hex}"
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.connect(address)
    Thread(target=_follow, args=(monitor, lost), daemon=True, name="EngineLinks").start()


def _follow(monitor: zmq.Socket[Any], lost: Callable[[], None]) -> None:
    strangers: set[int] = set()  # later connections: the engines have theirs by now
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


def _watch_engines(start: Callable[[MPClient], None], self: MPClient) -> None:
    # All engines have reported that they are ready, each over a link of its own.
    start(self)
    client, resources = weakref.ref(self), self.resources
    assert resources.input_socket is not None
    endpoint = resources.input_socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    if endpoint.startswith(b"tcp://"):
        _watch(resources.ctx, resources.input_socket, _ENDS, lambda: _lose_engines(client()))


def _fail_pending_calls(
    shutdown: Callable[..., None], self: Any, *args: Any, **options: Any
) -> None:
    # vLLM fails only later calls, and those of an event loop. A call sent shortly before the engine
    # ended, or a step that an `LLM` waits for, would wait forever.
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
    # Does what vLLM does if a local engine dies, but fails the clients first: local engines may
    # take some seconds to end. `client` is vLLM's `MPClient`, or None if it is gone, too.
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


def _watch_server(process: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
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
    # Ends this process as its launcher would, at once: nobody waits for its results.
    logger.error("%s: shutting down the engine", reason)
    engine.vllm_config.shutdown_timeout = 0
    os.kill(os.getpid(), signal.SIGTERM)
