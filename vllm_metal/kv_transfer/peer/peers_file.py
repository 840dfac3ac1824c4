# SPDX-License-Identifier: Apache-2.0
"""A file that names the peers, one address a line; it may change while the engine runs."""

from __future__ import annotations

from pathlib import Path

from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.limits import MAX_PEERS

_MAX_BYTES = 64 << 10


def parse_peers(text: str) -> tuple[Address, ...]:
    """Reads addresses, one a line; what follows a # is a comment, and empty lines are nothing.

    Raises:
        ValueError: a line is no address, one is named twice, or there are too many; says which.
    """
    found: dict[Address, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].strip()):
            continue
        try:
            address = Address.parse(words)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if address in found:
            raise ValueError(f"line {number} names {address} again, after line {found[address]}")
        found[address] = number
    if len(found) > MAX_PEERS:
        raise ValueError(f"names {len(found)} addresses, and {MAX_PEERS} are the most")
    return tuple(found)


def read_peers(path: Path) -> tuple[Address, ...]:
    """Reads a file of peers, which may name none.

    Raises:
        ValueError: it cannot be read or understood; the message names it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"has more than {_MAX_BYTES} bytes")
        return parse_peers(data.decode())
    except OSError as error:
        raise ValueError(f"the file of peers {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"the file of peers {path}: {error}") from error


class PeersFile:
    """A file of peers that is read again when it has changed."""

    def __init__(self, path: Path) -> None:
        """Notes what the file names now.

        Args:
            path: the file's.

        Raises:
            ValueError: see `read_peers`.
        """
        self._path = path
        self._stamp = self._stat()
        #: The addresses that it named when it was last understood.
        self.addresses = read_peers(path)

    def read_again(self) -> bool:
        """Reads the file if it has changed since the last call; whether other peers are named now.

        Raises:
            ValueError: it has changed, and cannot be read or understood; raised once a change.
                The addresses of before stay.
        """
        stamp = self._stat()
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # taken before reading: what is written meanwhile is a change again
        addresses = read_peers(self._path)
        before, self.addresses = self.addresses, addresses
        return set(before) != set(addresses)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
