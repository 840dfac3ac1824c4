# SPDX-License-Identifier: Apache-2.0
"""Roll: who the peers are now, and which of them are there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from vllm.logger import init_logger

from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.clients import Clients
from vllm_metal.kv_transfer.peer.peers_file import PeersFile

logger = init_logger(__name__)

#: Seconds between two looks at the file, and at who is there.
_PERIOD = 1.0


class Roll:
    """Reads the file of peers again as it changes, and greets who was gone, in a thread.

    So no request ever waits for a peer that is known to be away. Where the peers are a list and
    nobody is greeted, there is no thread.
    """

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
            clients: of the peers.
            peers: who they are at first.
            file: that names them; None: they stay.
            own: where this engine listens; it is left out.
            greets: whether peers that were away are greeted until they answer.
        """
        self._clients = clients
        self._file = file
        self._own = own
        self._greets = greets
        self._there: set[Address] = set()  # whom the log has called there
        #: Whom to ask, best first.
        self.addresses = self._without_own(peers)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self.addresses or file is not None:
            self._start()

    def _start(self) -> None:
        if self._greets or self._file is not None:
            self._thread = threading.Thread(target=self._run, name="kv-peer-roll", daemon=True)
            self._thread.start()

    def _without_own(self, peers: Iterable[Address]) -> tuple[Address, ...]:
        return tuple(peer for peer in peers if peer != self._own)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._clients.close()  # who is being greeted is waited for no longer
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
        self._clients.keep(self.addresses)
        self._there.intersection_update(self.addresses)
        logger.info("Now fetching K/V from %s", ", ".join(map(str, self.addresses)) or "nobody")

    def _greet(self) -> None:
        """All at once: one that does not answer must not keep the others waiting."""
        peers = [self._clients.at(each) for each in self.addresses]
        away = [peer for peer in peers if peer.engine_id is None or peer.is_in_trouble]
        threads = [threading.Thread(target=peer.hello, name="kv-peer-hello") for peer in away]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there = {peer.address for peer in peers if peer.engine_id and not peer.is_in_trouble}
        for address in there - self._there:
            logger.info("Added the peer %s", address)
        for address in self._there - there:
            logger.info("Removed the peer %s", address)
        self._there = there
