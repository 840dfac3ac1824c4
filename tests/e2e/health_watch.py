# SPDX-License-Identifier: Apache-2.0
"""Measures the response time of /health from a separate process: `python health_watch.py URL`.

It ends at the end of its standard input, and prints the number of requests and the worst time in
seconds.
"""

import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE_S = 0.05


@contextmanager
def watching(url: str) -> Iterator[list[float]]:
    """Yields the number of requests and the worst time in seconds, available after the block."""
    found: list[float] = []
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, url]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield found
        told, _ = process.communicate()
    found += [float(number) for number in told.split()]


def main(url: str) -> None:
    worst, asked = 0.0, 0
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(_PAUSE_S):
        started = time.monotonic()
        with urllib.request.urlopen(f"{url}/health", timeout=60) as reply:
            reply.read()
        worst, asked = max(worst, time.monotonic() - started), asked + 1
    print(asked, worst)


if __name__ == "__main__":
    main(sys.argv[1])
