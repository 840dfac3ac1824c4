# SPDX-License-Identifier: Apache-2.0
"""A real Redis server, where Debian's package redis-server or Homebrew's redis is installed."""

import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

REDIS = shutil.which("redis-server")
NO_REDIS = "no redis-server here (Debian: redis-server; Homebrew: redis)"


@contextmanager
def redis_server(port, folder):
    """Runs a server that forgets all when it ends; its log goes to the folder."""
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    with open(folder / "redis.log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()
