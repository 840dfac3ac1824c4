# SPDX-License-Identifier: Apache-2.0
"""Runs nginx with the shipped configuration on a free loopback port, in front of fake servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import httpx
from deploy.queries import DEPLOY
from e2e.server import free_port

PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONFIGURATION = DEPLOY / "nginx" / "vllm-metal.conf"
_LISTEN, _SERVER = "listen 127.0.0.1:8080;", "server 127.0.0.1:8000 max_fails=2 fail_timeout=10s;"
#: The context of the shipped file, as in Debian's nginx.conf.
_MAIN = """
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxied;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/vllm-metal.conf;
}}
"""
EVENTS = (b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n")


class Double(ThreadingHTTPServer):
    """A fake server; a stream stops after its first event until `go_on` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[str, str]] = []  # path and key of each request
        self.draining = False  # whether it rejects new requests
        self.dying = False  # whether it ends during a request
        self.chunked = True  # whether streams are chunked, or end by hanging up
        self.go_on = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits for the acknowledgement of its headers
    server: Double

    def do_GET(self) -> None:
        self._answer(200, {"path": self.path})

    def do_POST(self) -> None:
        fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = self.headers.get("authorization") or self.headers.get("x-api-key") or ""
        self.server.seen.append((self.path, key))
        if self.server.dying:
            self.close_connection = True
        elif self.server.draining:
            self._answer(503, {"error": "draining"})
        elif fields.get("stream"):
            self._stream()
        else:
            self._answer(200, {"port": self.server.server_address[1]})

    def _answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        chunked = self.server.chunked
        self.send_header(
            *(("transfer-encoding", "chunked") if chunked else ("connection", "close"))
        )
        self.end_headers()
        for number, event in enumerate(EVENTS):
            if number == 1:
                self.server.go_on.wait(240)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event) if chunked else event)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def double() -> Iterator[Double]:
    """Runs a fake server until the block ends."""
    with Double() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.go_on.set()
            server.shutdown()
            thread.join()


@contextmanager
def nginx(
    servers: Sequence[str], folder: Path, changes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Runs nginx until the block ends; yields its URL.

    Args:
        servers: host and port of each server behind it.
        folder: folder for its files.
        changes: texts of the shipped configuration, and their replacements.
    """
    address = f"127.0.0.1:{free_port()}"
    text = _replaced(CONFIGURATION.read_text(), _LISTEN, f"listen {address};")
    lines = "\n".join(_SERVER.replace("127.0.0.1:8000", server) for server in servers)
    text = _replaced(text, _SERVER, lines)
    for old, new in changes.items():
        text = _replaced(text, old, new)
    (folder / "vllm-metal.conf").write_text(text)
    (folder / "nginx.conf").write_text(_MAIN.format(folder=folder))
    assert PROGRAM is not None
    command = [PROGRAM, "-c", folder / "nginx.conf", "-p", folder, "-e", folder / "start.log"]
    process = subprocess.Popen(command)
    try:
        url = f"http://{address}"
        _wait_until_it_listens(process, url, folder)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def _wait_until_it_listens(process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(f"{url}/")
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError((folder / "start.log").read_text() + (folder / "error.log").read_text())
