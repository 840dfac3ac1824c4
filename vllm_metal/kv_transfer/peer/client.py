# SPDX-License-Identifier: Apache-2.0
"""Peer: looks up and fetches another engine's pages by key."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from blake3 import blake3
from vllm.logger import init_logger

from vllm_metal.kv_transfer.peer import handshake
from vllm_metal.kv_transfer.peer.connections import Connections, Unavailable
from vllm_metal.kv_transfer.peer.handshake import Terms
from vllm_metal.kv_transfer.peer.lease_manager import LeaseManager
from vllm_metal.kv_transfer.peer.limits import (
    CONNECTIONS_OF_A_PEER,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    TIMEOUTS,
    Timeouts,
)
from vllm_metal.kv_transfer.peer.messages import (
    SESSION_BYTES,
    Ask,
    Done,
    Fetch,
    Found,
    NoPage,
    ProtocolError,
    Release,
    Renew,
    Row,
    Waiting,
    checksum,
    decode,
)
from vllm_metal.kv_transfer.peer.wire import Link, PeerDown, Unwanted
from vllm_metal.metrics.metric import Metric
from vllm_metal.settings.address import Address

logger = init_logger(__name__)

T = TypeVar("T")
_LONGEST_REASON = 500  # characters of a message that quotes a peer


@dataclass(frozen=True, kw_only=True)
class PeerStats:
    """Counters over the lifetime of a `Peer`."""

    num_asked: int  # pages
    num_found: int
    fetched_pages: int
    fetched_bytes: int = Metric(
        "total", "vllm:kv_peer_fetched_bytes", "Bytes of pages that this engine got from peers."
    ).field()
    #: Includes fetches that were no longer wanted.
    failed_fetches: int = Metric(
        "total",
        "vllm:kv_peer_failed_fetches",
        "Requests to peers that did not return all pages.",
    ).field()
    bad_checksums: int = Metric(
        "total", "vllm:kv_peer_corrupt_pages", "Pages of peers whose checksum was wrong."
    ).field()


class Peer:
    """Client of one server; thread-safe, never raises.

    A peer that is down, slow, incompatible or of another version counts as having no pages.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        terms: Callable[[], Terms],
        difference: Callable[[Mapping[str, Any]], str],
        clock: Callable[[], float] = time.monotonic,
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        """Connects on first use.

        Args:
            address: address of a `PageServer`.
            secret: shared by both sides; b"" for none, which only allows loopback addresses.
            terms: returns this engine's current `Terms`; called from any thread, on every call.
            difference: describes how the peer's facts differ from this engine's.
            clock: returns seconds, for backing off and for leases.
        """
        self.address = address
        self._secret = secret
        self._terms = terms
        self._difference = difference
        self._clock = clock
        self._timeouts = timeouts
        self._session = secrets.token_bytes(SESSION_BYTES)
        self._lock = threading.Lock()
        self._engine_id: str | None = None
        self._is_failing = False
        self._down_until: float | None = None
        self._refused: Terms | None = None  # own terms that did not match the peer's
        self._refused_until = 0.0  # when to check whether the peer has changed
        self._trouble: str | None = None  # last logged problem, unless solved
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._connections = Connections(
            address,
            self._introduce,
            self._is_current,
            self._may_try,
            timeouts,
            CONNECTIONS_OF_A_PEER,
        )
        self._leases = LeaseManager(self._send_message, timeouts, clock)

    @property
    def engine_id(self) -> str | None:
        """Id of the engine that last answered; None before. `lookup(())` fetches it."""
        return self._engine_id

    @property
    def is_down(self) -> bool:
        """Whether the peer could not be reached recently, so that calls skip it."""
        with self._lock:
            return self._down_until is not None and self._clock() < self._down_until

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt to use the peer failed; `ping` tries again."""
        return self._is_failing

    def ping(self) -> bool:
        """Returns whether the peer answers and has K/V that this engine can use; blocks."""
        answers = self._call(_renew, otherwise=False)
        if answers:
            self._note_good()
        return answers

    def avoid(self) -> None:
        """Backs off from this peer, like from one that could not be reached."""
        self._is_failing = True
        with self._lock:
            self._down_until = self._clock() + self._timeouts.down

    def lookup(self, keys: Iterable[bytes], wait_s: float | None = None) -> frozenset[bytes]:
        """Returns the pages that the peer has, and leases them; blocks.

        The leases last until each call's results are passed to `release` once, or for some minutes.

        Args:
            keys: in the order of the text; only the first ones are leased, up to a limit.
            wait_s: seconds to wait for pages being produced, 10 at most; None: 10.

        Returns:
            Available pages; none if the peer is down, refused or slow.
        """
        asked = list(dict.fromkeys(keys))
        wait_ms = int(1000 * (self._timeouts.wait if wait_s is None else max(0.0, wait_s)))
        self._leases.want(asked)
        found: set[bytes] = set()
        for part in _parts(asked) or [[]]:  # without keys, still connects
            if (there := self._call(partial(_ask, part, wait_ms), None)) is None:
                break
            found |= there
        self._leases.not_found(key for key in asked if key not in found)
        self._count(num_asked=len(asked), num_found=len(found))
        if found:
            self._leases.start_renewing()
        return frozenset(found)

    def fetch(
        self, keys: Sequence[bytes], pages: Sequence[memoryview], wanted: Callable[[], bool]
    ) -> bool:
        """Receives pages into memory; blocks.

        Args:
            pages: writable, contiguous memory of each page's size; undefined after False.
            wanted: returns whether to go on; called often, from this thread.

        Returns:
            Whether all pages came with correct checksums.
        """
        num_bytes = sum(page.nbytes for page in pages)
        good = True
        for start in range(0, len(keys), MAX_KEYS):
            part = slice(start, start + MAX_KEYS)
            work = partial(self._fetch, keys[part], pages[part], wanted)
            good = good and self._call(work, otherwise=False)
        if good:
            self._count(fetched_pages=len(keys), fetched_bytes=num_bytes)
        else:
            self._count(failed_fetches=1)
        return good

    def release(self, keys: Iterable[bytes]) -> None:
        """Releases pages that `lookup` found, without blocking."""
        self._leases.release(keys)

    def stats(self) -> PeerStats:
        with self._lock:
            return PeerStats(**{name: self._counts[name] for name in PeerStats.__annotations__})

    def close(self) -> None:
        """Ends pending calls; later ones find nothing."""
        self._closed = True
        self._connections.close()
        self._leases.close()

    # -- calls

    def _call(self, work: Callable[[Link], T], otherwise: T) -> T:
        """Runs `work` on a connection; returns `otherwise` if that fails."""
        if not self._may_try():
            return otherwise
        try:
            return self._connections.call(work)
        except PeerDown as error:
            self._note_down(str(error))
        except ProtocolError as error:
            self._note_down(f"it violates the protocol: {error}")
        except (OSError, handshake.Refused, Unavailable, Unwanted):
            pass  # a connection broke, the reason was logged, or the answer is no longer wanted
        except Exception:
            logger.exception("A call to the peer %s failed", self.address)
        return otherwise

    def _fetch(
        self,
        keys: Sequence[bytes],
        pages: Sequence[memoryview],
        wanted: Callable[[], bool],
        link: Link,
    ) -> bool:
        own = self._terms().identity  # compared again below: the pool may change meanwhile
        buffers = [page.cast("B") for page in pages]
        link.send(Fetch(list(keys)))
        for key, buffer in zip(keys, buffers, strict=True):
            row = _row(link, wanted)
            if isinstance(row, NoPage):
                return False
            if row.size != buffer.nbytes:
                raise PeerDown(f"it sent a page of {row.size} bytes, expected {buffer.nbytes}")
            hashed = blake3()
            link.receive_row(buffer, wanted, hashed.update)
            if checksum(key, hashed) != row.checksum:
                self._count(bad_checksums=1)
                raise PeerDown("it sent a page with a wrong checksum")
        return self._terms().identity == own

    def _send_message(self, message: Renew | Release) -> None:
        self._call(partial(_send, message), None)

    def _introduce(self, link: Link) -> Terms:
        own = self._terms()
        try:
            theirs = handshake.introduce(link, self._secret, self._session, own)
            self._engine_id = theirs.engine_id
            if theirs.engine_id == own.engine_id:
                self._refuse(own, None)  # normal: a shared list of peers includes this engine
                raise handshake.Refused("it is this engine")
            if theirs.content != own.content:
                raise handshake.Refused(self._describe_difference(own, theirs))
        except handshake.Refused as refused:
            if self._engine_id != own.engine_id:
                self._refuse(own, str(refused))
            raise
        self._note_good()
        return own

    def _is_current(self, own: Terms) -> bool:
        return own.identity == self._terms().identity

    def _describe_difference(self, own: Terms, theirs: Terms) -> str:
        """Describes the difference in one line; the peer's facts may be anything."""
        if theirs.fingerprint == own.fingerprint:
            return f"its pages have {theirs.page_bytes} bytes, this engine's {own.page_bytes}"
        try:
            words = " ".join(self._difference(theirs.facts).split())
        except Exception:
            words = ""
        return words[:_LONGEST_REASON] or "its K/V are of another model, or other settings"

    # -- whether it is worth trying

    def _may_try(self) -> bool:
        with self._lock:
            now, refused = self._clock(), self._refused
            if self._closed or (self._down_until is not None and now < self._down_until):
                return False
            if refused is None or now >= self._refused_until:
                return True
        return not self._is_current(refused)

    def _note_good(self) -> None:
        with self._lock:
            trouble, self._trouble = self._trouble, None
            self._down_until = self._refused = None
            self._is_failing = False
        if trouble is not None:
            logger.info("Connected to the peer %s", self.address)

    def _note_down(self, reason: str) -> None:
        if self._closed:
            return
        self.avoid()
        self._warn_once(
            f"The peer {self.address} is unavailable ({reason}); prompts are computed instead"
        )

    def _refuse(self, own: Terms, reason: str | None) -> None:
        """Backs off from this peer, and logs `reason` unless it is None."""
        self._is_failing = True
        with self._lock:
            self._refused, self._refused_until = own, self._clock() + self._timeouts.refused
        if reason is not None:
            self._warn_once(f"The peer {self.address} is not used: {reason}")

    def _warn_once(self, trouble: str) -> None:
        """Logs a problem once, until it changes or is solved."""
        with self._lock:
            is_new = trouble != self._trouble
            self._trouble = trouble
        if is_new:
            logger.warning("%s", trouble)

    def _count(self, **numbers: int) -> None:
        with self._lock:
            self._counts.update(numbers)


def _send(message: Renew | Release, link: Link) -> None:
    link.send(message)
    decode(link.receive(MAX_MESSAGE_BYTES), Done)


def _renew(link: Link) -> bool:
    _send(Renew(), link)
    return True


def _ask(keys: list[bytes], wait_ms: int, link: Link) -> set[bytes] | None:
    if not keys:
        return set()
    link.send(Ask(keys, wait_ms))
    while isinstance(answer := decode(link.receive(MAX_MESSAGE_BYTES), Found, Waiting), Waiting):
        pass
    if len(answer.there) != len(keys):
        raise ProtocolError(f"it answered for {len(answer.there)} pages, expected {len(keys)}")
    return {key for key, is_there in zip(keys, answer.there, strict=True) if is_there}


def _row(link: Link, wanted: Callable[[], bool]) -> Row | NoPage:
    """Receives the server's next row, which it may have to copy out of its pool first."""
    expected = (Row, NoPage, Waiting)
    while isinstance(row := decode(link.receive(MAX_MESSAGE_BYTES, wanted), *expected), Waiting):
        pass
    assert isinstance(row, Row | NoPage)
    return row


def _parts(keys: list[bytes]) -> list[list[bytes]]:
    return [keys[start : start + MAX_KEYS] for start in range(0, len(keys), MAX_KEYS)]
