# SPDX-License-Identifier: Apache-2.0
"""Benchmarks import each other by name, and so do their tests; a server that answers them."""

import http.server
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _server import Server


@pytest.fixture
def serving(tmp_path: Path) -> Callable[[type[http.server.BaseHTTPRequestHandler]], object]:
    """Serves by a handler on a free port of the loopback, within a `with` block."""

    @contextmanager
    def serve(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[Server]:
        listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield Server(f"http://127.0.0.1:{listener.server_port}", "m", tmp_path / "log")
        listener.shutdown()
        thread.join()
        listener.server_close()

    return serve
