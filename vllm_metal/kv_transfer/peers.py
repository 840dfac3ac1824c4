# SPDX-License-Identifier: Apache-2.0
"""The engines that this one asks for pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from vllm_metal.kv_transfer.peer.client import Peer

#: Seconds that a request waits for its peers' answers; then it computes what nobody has offered.
#: A peer is connected to within 2 s, and may wait some seconds for pages that it is copying.
ASK_SECONDS = 10.0


class Asked:
    """What peers have of a request's pages: answers to one question, which may still be coming."""

    def __init__(
        self,
        answers: Sequence[tuple[Peer, Future[frozenset[bytes]]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            answers: of each peer that was asked, best first.
            clock: seconds.
        """
        self.answers = answers
        self._clock = clock
        self._ends = clock() + ASK_SECONDS

    @property
    def done(self) -> bool:
        """Whether all have answered, or it is time to go on without the others."""
        return all(answer.done() for _, answer in self.answers) or self._clock() >= self._ends

    def peer_of(self, key: bytes) -> Peer | None:
        """A peer that has a page, of those that have answered."""
        for peer, answer in self.answers:
            if answer.done() and key in answer.result():
                return peer
        return None


#: The answer where nobody was asked.
NOTHING = Asked(())


class Peers:
    """All of them. What waits for the network runs in threads, at most four questions a peer."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        """
        Args:
            peers: best first; closed along with this.
        """
        self._peers = peers
        self._threads = ThreadPoolExecutor(4 * len(peers), "kv-ask")

    def ask(self, keys: Sequence[bytes], engine_id: str | None) -> Asked:
        """Asks who has some pages; returns at once.

        Args:
            keys: of the pages.
            engine_id: of the engine that is known to have computed them; None: nobody is.
        """
        asked = [peer for peer in self._peers if engine_id and peer.engine_id == engine_id]
        asked = [peer for peer in asked or self._peers if not peer.is_down]
        if not keys or not asked:
            return NOTHING
        return Asked([(peer, self._threads.submit(peer.ask, keys)) for peer in asked])

    def release(self, asked: Asked) -> None:
        """Tells peers that their pages are not needed any more; returns at once."""
        for peer, answer in asked.answers:
            answer.add_done_callback(partial(self._release, peer))

    def _release(self, peer: Peer, answer: Future[frozenset[bytes]]) -> None:
        with suppress(RuntimeError):  # the threads have ended: so have the peer's leases
            if not answer.cancelled() and answer.result():
                self._threads.submit(peer.release, answer.result())

    def close(self) -> None:
        """Ends all that is under way."""
        for peer in self._peers:
            peer.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
