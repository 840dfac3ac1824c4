# SPDX-License-Identifier: Apache-2.0
"""A real Redis server, if Debian's redis-server or Homebrew's redis is installed."""

import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

REDIS = shutil.which("redis-server")
NO_REDIS = "no redis-server here (Debian: redis-server; Homebrew: redis)"
_READY = "eady to accept connections"


@contextmanager
def held_port():
    """Reserves a port for a server, on Linux exclusively."""
    with socket.socket() as held:
        is_linux = sys.platform == "linux"  # elsewhere a server could not listen beside it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_linux)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        if not is_linux:
            held.close()
        yield port


@contextmanager
def redis_server(port, folder):
    """Runs a server that discards its data at the end; its log goes to the folder."""
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    path = folder / "redis.log"
    with path.open("a") as log:
        begin = log.tell()
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while _READY not in (said := path.read_text()[begin:]):
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()
