# SPDX-License-Identifier: Apache-2.0
"""Serves pages to peers as an engine does, and by a plain socket.

Prints both ports, and exits at the end of its input: `python _peer_source.py PAGE_BYTES PAGES`.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from contextlib import suppress

import vllm.config  # noqa: F401  # before vllm.distributed: they import each other

from vllm_metal.kv_transfer.peer.export_cache import ExportCache
from vllm_metal.kv_transfer.peer.handshake import Terms
from vllm_metal.kv_transfer.peer.server import PageServer
from vllm_metal.settings.address import Address

LOOPBACK = "127.0.0.1"
#: Request to the plain socket: number of the first page, and number of pages.
REQUEST = struct.Struct("<II")


def terms(page_bytes: int, engine_id: str) -> Terms:
    """Terms that both processes agree on."""
    return Terms(engine_id, "00" * 16, {}, (page_bytes,))


def key(number: int) -> bytes:
    """Returns a page's key: 36 bytes, as in vLLM."""
    return number.to_bytes(36, "big")


def serve_plainly(listener: socket.socket, pages: list[bytes]) -> None:
    """Sends the requested pages to each client, one after another."""
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_send, args=(sock, pages), daemon=True).start()


def _send(sock: socket.socket, pages: list[bytes]) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, suppress(OSError):
        while asked := sock.recv(REQUEST.size, socket.MSG_WAITALL):
            first, count = REQUEST.unpack(asked)
            for page in pages[first : first + count]:
                sock.sendall(page)


def main() -> None:
    page_bytes, num_pages = map(int, sys.argv[1:])
    pages = [os.urandom(page_bytes) for _ in range(num_pages)]
    export_cache = ExportCache(2 * page_bytes * num_pages)
    for number, page in enumerate(pages):
        assert export_cache.put(key(number), memoryview(page))
    own = terms(page_bytes, "source")
    server = PageServer(Address(LOOPBACK, 0), b"", export_cache, lambda: own)
    listener = socket.create_server((LOOPBACK, 0))
    threading.Thread(target=serve_plainly, args=(listener, pages), daemon=True).start()
    print(server.port, listener.getsockname()[1], flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
