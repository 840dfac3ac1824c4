# SPDX-License-Identifier: Apache-2.0
"""Finds the user whose process listens on a local port, before anything is sent to it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTENS = "0A"  # TCP_LISTEN of Linux (include/net/tcp_states.h)
_UNKNOWN = -1  # another user: on macOS, users see only the sockets of their own processes


def owner(port: int) -> int | None:
    """Returns the uid of the user who listens on a loopback port; None if nobody does."""
    if sys.platform == "linux":
        return _listener_in_tables(port)
    return _own_listener(port)


def _listener_in_tables(port: int) -> int | None:
    found = set()
    for table in TABLES:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    found.add(int(uid))
    others = found - {os.getuid(), 0}
    return next(iter(others or found), None)


def _own_listener(port: int) -> int | None:
    import psutil

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return process.uids().real
    return _UNKNOWN if _accepts(port) else None


def _accepts(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
