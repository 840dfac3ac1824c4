# SPDX-License-Identifier: Apache-2.0
"""A relay in a separate process that delays, holds or cuts connections to an address.

`python -m network.relay TARGET_HOST TARGET_PORT` prints the port that it listens on, and reads
commands from its input: `delay SECONDS`, `hold`, `pass`, `cut` (only existing connections),
`refuse`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_AT_ONCE = 1 << 16  # bytes


class Relay:
    """A running relay that a test controls."""

    def __init__(self, process: subprocess.Popen[str], host: str, port: int) -> None:
        self._process = process
        self.host, self.port = host, port

    @property
    def address(self) -> str:
        """Its address as host:port."""
        return f"{self.host}:{self.port}"

    def order(self, words: str) -> None:
        """Sends a command, and returns once it is executed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def relay(host: str, port: int, delay: float = 0.0, listen: str = "127.0.0.1") -> Iterator[Relay]:
    """Runs a relay to an address.

    Args:
        host, port: target.
        delay: seconds of delay in each direction.
        listen: its own address.
    """
    command = [sys.executable, __file__, host, str(port), listen]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    try:
        assert process.stdout is not None
        found = Relay(process, listen, int(process.stdout.readline()))
        found.order(f"delay {delay}")
        yield found
    finally:
        process.kill()
        process.wait()


class _Relaying:
    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._delay = 0.0
        self._passes = asyncio.Event()
        self._passes.set()
        self._refuses = False
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._open -= {writer, back}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards bytes in order, each after the delay, which does not limit the rate."""
        now = asyncio.get_running_loop().time
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)

        async def read() -> None:
            data = b"there will be more"
            while data:
                with suppress(ConnectionError):
                    data = await reader.read(_AT_ONCE)
                await queue.put((now() + self._delay, data))
                if reader.exception() is not None:
                    await queue.put((now(), b""))
                    return

        reading = asyncio.create_task(read())
        with suppress(ConnectionError):
            while True:
                at, data = await queue.get()
                await asyncio.sleep(at - now())
                await self._passes.wait()
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        reading.cancel()
        writer.close()

    def obey(self, words: list[str]) -> None:
        if words[0] == "delay":
            self._delay = float(words[1])
        elif words[0] == "hold":
            self._passes.clear()
        elif words[0] == "pass":
            self._passes.set()
            self._refuses = False
        elif words[0] == "cut":
            for writer in self._open:
                writer.transport.abort()
        elif words[0] == "refuse":
            self._refuses = True
        else:
            raise ValueError(f"no order of a relay: {words}")


async def _main(host: str, port: str, listen: str) -> None:
    relaying = _Relaying(host, int(port))
    server = await asyncio.start_server(relaying.serve, listen, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        relaying.obey(line.split())
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
