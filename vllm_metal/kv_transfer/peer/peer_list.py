# SPDX-License-Identifier: Apache-2.0
"""The current peers, from a list or a file that may change, and which of them answer."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_metal.kv_transfer.peer.limits import MAX_PEERS
from vllm_metal.settings.address import Address

if TYPE_CHECKING:
    from vllm_metal.kv_transfer.peer.clients import Clients

logger = init_logger(__name__)

#: Seconds between checks of the file and of the peers.
_PERIOD = 1.0
_MAX_BYTES = 64 << 10


def parse_peers(text: str) -> tuple[Address, ...]:
    """Parses addresses, one per line; # starts a comment, and empty lines are ignored.

    Raises ValueError if a line is not an address or a duplicate, or there are too many.
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
        raise ValueError(f"names {len(found)} addresses, but the maximum is {MAX_PEERS}")
    return tuple(found)


def read_peers(path: Path) -> tuple[Address, ...]:
    """Reads a file of peers, which may be empty; raises ValueError if it is invalid."""
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
    """A file of peers that is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Reads the file; raises ValueError, see `read_peers`."""
        self._path = path
        self._stamp = self._stat()
        #: The addresses from the last valid contents.
        self.addresses = read_peers(path)

    def read_again(self) -> bool:
        """Reads the file if it has changed; returns whether the set of peers has changed.

        Raises ValueError once per invalid change; the previous addresses stay.
        """
        stamp = self._stat()
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # taken before reading, so that a write meanwhile counts as a change
        addresses = read_peers(self._path)
        before, self.addresses = self.addresses, addresses
        return set(before) != set(addresses)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


class PeerList:
    """Holds the peers' addresses; a thread rereads a changed file and tries missing peers again."""

    # So no request waits for a peer that is known to be down.

    def __init__(
        self,
        clients: Clients,
        peers: Sequence[Address],
        file: PeersFile | None,
        own: Address | None,
        greets: bool,
    ) -> None:
        """
        Args:
            peers: the initial peers.
            file: lists peers; None: they are fixed.
            own: this engine's address, which is left out of the list.
            greets: try missing peers again until they answer.
        """
        self._clients = clients
        self._file = file
        self._own = own
        self._greets = greets
        self._present: set[Address] = set()  # peers logged as present
        #: Peers to ask, best first.
        self.addresses = self._without_own(peers)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self.addresses or file is not None:
            self._start()

    def _start(self) -> None:
        if self._greets or self._file is not None:
            self._thread = threading.Thread(target=self._run, name="kv-peer-list", daemon=True)
            self._thread.start()

    def _without_own(self, peers: Iterable[Address]) -> tuple[Address, ...]:
        return tuple(peer for peer in peers if peer != self._own)

    def close(self) -> None:
        self._closed.set()
        self._clients.close()  # ends pending greetings
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._read_again()
                if self._greets:
                    self._greet()
            except Exception:
                logger.exception("Updating the list of peers failed")
            self._closed.wait(_PERIOD)

    def _read_again(self) -> None:
        try:
            if self._file is None or not self._file.read_again():
                return
        except ValueError as error:
            logger.warning("%s; keeping the previous peers", error)
            return
        self.addresses = self._without_own(self._file.addresses)
        self._clients.retain(self.addresses)
        self._present.intersection_update(self.addresses)
        logger.info("Now fetching K/V from %s", ", ".join(map(str, self.addresses)) or "no peers")

    def _greet(self) -> None:
        # All at once, so that a peer that does not answer does not delay the others.
        peers = [self._clients.at(each) for each in self.addresses]
        away = [peer for peer in peers if peer.engine_id is None or peer.is_failing]
        threads = [threading.Thread(target=peer.ping, name="kv-peer-ping") for peer in away]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there = {peer.address for peer in peers if peer.engine_id and not peer.is_failing}
        for address in there - self._present:
            logger.info("Added the peer %s", address)
        for address in self._present - there:
            logger.info("Removed the peer %s", address)
        self._present = there
