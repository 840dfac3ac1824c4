# SPDX-License-Identifier: Apache-2.0
"""Shortens the limit for names of Unix sockets, and renames an option, as on a Mac."""

from __future__ import annotations

import errno
import os
import socket
from types import ModuleType
from typing import Any

from darwin_double import modules

#: Maximum bytes of a name without the final zero: `sun_path` has 104, Linux's 108.
LONGEST = 103


def install() -> None:
    for name in ("bind", "connect", "connect_ex"):
        setattr(socket.socket, name, _limited(getattr(socket.socket, name)))
    modules.after_import("zmq", _limit_zmq)
    socket.TCP_KEEPALIVE = socket.TCP_KEEPIDLE  # type: ignore[attr-defined]


def _limited(real: Any) -> Any:
    def call(self: socket.socket, address: Any) -> Any:
        if self.family == socket.AF_UNIX:
            if os.fsencode(address)[:1] == b"\0":
                raise FileNotFoundError(2, "No such file or directory")  # no abstract names
            if len(os.fsencode(address)) > LONGEST:
                raise OSError("AF_UNIX path too long")
        return real(self, address)

    return call


def _limit_zmq(zmq: ModuleType) -> None:
    zmq.IPC_PATH_MAX_LEN = LONGEST
    for name in ("bind", "connect"):
        setattr(zmq.Socket, name, _limited_zmq(zmq, getattr(zmq.Socket, name)))


def _limited_zmq(zmq: ModuleType, real: Any) -> Any:
    def call(self: Any, address: str) -> Any:
        if address.startswith("ipc://") and len(os.fsencode(address[6:])) > LONGEST:
            raise zmq.ZMQError(errno.ENAMETOOLONG)
        return real(self, address)

    return call
