# SPDX-License-Identifier: Apache-2.0
"""Makes benchmarks importable, and provides a server for them."""

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
    """Serves with a handler on a free loopback port, within a `with` block."""

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
