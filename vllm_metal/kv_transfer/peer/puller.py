# SPDX-License-Identifier: Apache-2.0
"""Puller: chooses what is pulled and from whom, measures it, and stays away from who fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from vllm_metal.kv_transfer.fingerprint import PoolContent
from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.line import Line
from vllm_metal.kv_transfer.peer.pull_choice import Circumstances, Offer, choose
from vllm_metal.kv_transfer.peer.pull_hint import Patience, PullHint
from vllm_metal.kv_transfer.pieces import PIECE_BYTES
from vllm_metal.metrics.metric import Metric

logger = init_logger(__name__)

#: Who has seen pulls of so many bytes, or steps of so many tokens, can tell what more would take.
_ENOUGH_BYTES, _ENOUGH_TOKENS = 64 << 20, 256
#: Seconds of a pull whose failure would leave nothing, see `Patience`.
_LONGEST_AT_RISK = 1.0
#: Seconds that a peer is left alone after a load from there failed; doubled with each in a row.
_LEFT_ALONE, _LEFT_ALONE_MOST = 10.0, 300.0
#: Seconds until a link that is slower than computing is looked at again, by so many bytes.
_PROBE_AFTER, PROBE_BYTES = 30.0, 1 << 20
#: A probe that takes less than this part of what the link was thought to take.
_FASTER = 0.5
_CHOICES = "vllm:kv_pull_choices"
_CHOSEN = "Requests whose pages a peer had, by the choice that was estimated to be faster."
#: Seconds after which streams that were last seen are thought to have ended.
_STREAMS_END = 1.0


@dataclass
class _Standing:
    """What is known of a peer."""

    link: Line = field(default_factory=lambda: Line(_ENOUGH_BYTES))
    used_at: float = 0.0
    probed_at: float = float("-inf")
    num_failures: int = 0  # loads, since one that did not fail
    left_until: float = float("-inf")


@dataclass(frozen=True, kw_only=True)
class PullCounts:
    """Counters of all time."""

    pulled: int = Metric("total", _CHOICES, _CHOSEN, label=("choice", "pulled")).field(0)
    computed: int = Metric("total", _CHOICES, _CHOSEN, label=("choice", "computed")).field(0)
    failed: int = Metric(
        "total", "vllm:kv_pulls_failed", "Pulls that did not return all pages in time."
    ).field(0)


class Pull:
    """One request's pages at the peer that was chosen."""

    def __init__(
        self, puller: Puller, address: Address, keys: frozenset[bytes], seconds: float
    ) -> None:
        """
        Args:
            puller: is told how it went.
            address: of the peer.
            keys: of its pages.
            seconds: that it is thought to take.
        """
        self.address = address
        self.keys = keys
        self._puller = puller
        self._seconds = seconds
        self._num_bytes: int | None = None  # until it begins
        self._began = 0.0

    def begin(self, keys: Sequence[bytes]) -> PullHint | None:
        """The worker is about to load pages, of which these are some; None: it has none of them."""
        wanted = [key for key in keys if key in self.keys]
        if not wanted:
            return None
        self._num_bytes = self._puller.num_bytes(wanted)
        self._began = self._puller.begins(self.address, self._seconds)
        return PullHint(dict.fromkeys(wanted, self.address), self._puller.patience())

    def ended(self, failed: bool) -> None:
        """The load is over; no more is told of it."""
        num_bytes, self._num_bytes = self._num_bytes, None
        if num_bytes is not None:
            self._puller.ended(self.address, num_bytes, self._began, failed)

    def given_up(self) -> None:
        """Nobody waits for it any more, which says nothing of the peer."""
        if self._num_bytes is not None:
            self._num_bytes = None
            self._puller.given_up()


class Puller:
    """All methods are the scheduler thread's."""

    def __init__(self, content: PoolContent, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            content: what pages are.
            clock: seconds.
        """
        self._clock = clock
        self._standings: dict[Address, _Standing] = {}
        self._num_pulling = 0
        self._free_at = float("-inf")  # when the pulls that go on are thought to be over
        self._last_end = float("-inf")
        self._counts = dict.fromkeys(PullCounts.__annotations__, 0)
        self.use(content)

    def use(self, content: PoolContent) -> None:
        """Pages are others from now on."""
        self._page_bytes = content.page_bytes
        self._block_tokens = int(content.fingerprint.facts["block_size"])
        self._compute = Line(_ENOUGH_TOKENS)
        self._step_seconds = 0.0  # of the last step beside streams
        self._streams_at = float("-inf")

    @property
    def counts(self) -> PullCounts:
        """What was chosen."""
        return PullCounts(**self._counts)

    def computed(self, prefill_rows: int, prefill_seconds: float, decode_seconds: float) -> None:
        """See `View.computed`."""
        if prefill_rows and prefill_seconds > 0.0:
            self._compute.add(prefill_rows, prefill_seconds)
        if decode_seconds > 0.0:
            self._step_seconds, self._streams_at = decode_seconds + prefill_seconds, self._clock()

    def trusts(self, address: Address) -> bool:
        """Whether a peer is worth asking."""
        standing = self._standings.get(address)
        return standing is None or self._clock() >= standing.left_until

    def keep(self, addresses: Collection[Address]) -> None:
        """Forgets all other peers."""
        self._standings = {at: each for at, each in self._standings.items() if at in addresses}

    def decide(
        self, keys: Sequence[bytes], found: Mapping[Address, Collection[bytes]]
    ) -> Pull | None:
        """Returns the pull that beats computing; None: there is none.

        Args:
            keys: of the pages that a request could begin with; of each group from the first on.
            found: those that each peer has.
        """
        now, offers, pages = self._clock(), {}, {}
        for address, there in found.items():
            tokens, usable = self._usable(keys, there)
            if tokens:
                standing = self._standing(address)
                num_bytes = self.num_bytes(usable)
                offers[address] = Offer(tokens, num_bytes, standing.link, standing.used_at)
                pages[address] = usable
        if not offers:
            return None
        chosen = choose(offers, self._circumstances(now))
        self._counts["computed" if chosen is None else "pulled"] += 1
        if chosen is None:
            return None
        address, seconds = chosen
        self._standing(address).used_at = now
        return Pull(self, address, frozenset(pages[address]), seconds)

    def _circumstances(self, now: float) -> Circumstances:
        """Beside streams, a piece enters the pool with each step."""
        has_streams = now - self._streams_at < _STREAMS_END
        return Circumstances(
            self._compute,
            wait=max(0.0, self._free_at - now) if self._num_pulling else 0.0,
            byte_seconds=self._step_seconds / PIECE_BYTES if has_streams else 0.0,
            longest=float("inf") if self._keeps_part else _LONGEST_AT_RISK,
        )

    @property
    def _keeps_part(self) -> bool:
        """Whether a request keeps the first pages of a load that fails."""
        return len(self._page_bytes) == 1

    def patience(self) -> Patience:
        """How long a load that begins now may take."""
        if not self._keeps_part:
            return Patience(0.0)
        known = self._compute.knows(self._block_tokens)
        return Patience(self._compute.each * self._block_tokens if known else None)

    def _usable(self, keys: Sequence[bytes], there: Collection[bytes]) -> tuple[int, list[bytes]]:
        """Tokens that pages stand for, and the pages: a group's first ones without a gap.

        Of a group that only needs its last pages a peer may have no others.
        """
        groups: dict[int, list[bytes]] = {}
        for key in keys:
            groups.setdefault(get_offload_group_idx(OffloadKey(key)), []).append(key)
        blocks, usable = 0, []
        for of_group in groups.values():
            gap = next((i for i, key in enumerate(of_group) if key not in there), len(of_group))
            blocks = max(blocks, gap)
            usable += of_group[:gap] or [key for key in of_group if key in there]
        if not blocks:
            blocks = max(
                (i + 1 for of in groups.values() for i, k in enumerate(of) if k in there), default=0
            )
        return blocks * self._block_tokens, usable

    def num_bytes(self, keys: Sequence[bytes]) -> int:
        """Bytes of pages."""
        return sum(self._page_bytes[get_offload_group_idx(OffloadKey(key))] for key in keys)

    def _standing(self, address: Address) -> _Standing:
        return self._standings.setdefault(address, _Standing())

    # -- how pulls go

    def begins(self, address: Address, seconds: float) -> float:
        """A pull begins; returns when."""
        now = self._clock()
        self._num_pulling += 1
        self._free_at = max(now, self._free_at) + seconds
        return now

    def given_up(self) -> None:
        """A pull does not go on."""
        self._num_pulling -= 1

    def ended(self, address: Address, num_bytes: int, began: float, failed: bool) -> None:
        """A pull is over.

        One after another is read: its time runs from when the one before was over.
        """
        now, standing = self._clock(), self._standing(address)
        self._num_pulling -= 1
        seconds = now - max(began, self._last_end)
        self._last_end = self._free_at = now
        if failed:
            self._counts["failed"] += 1
            standing.num_failures += 1
            rest = min(_LEFT_ALONE * 2 ** (standing.num_failures - 1), _LEFT_ALONE_MOST)
            standing.left_until = now + rest
            if standing.num_failures == 1:
                logger.warning(
                    "The peer %s did not send pages in time; not asking it again for a while",
                    address,
                )
            return
        standing.num_failures = 0
        bound = num_bytes * self._circumstances(now).byte_seconds
        if seconds > 0.0 and bound < seconds / 2:  # else it was this engine that took so long
            standing.link.add(num_bytes, seconds)

    # -- links that may have become faster

    def to_probe(self, addresses: Collection[Address]) -> list[Address]:
        """Returns peers to probe now, of those that a request leaves to compute."""
        now = self._clock()
        due = [at for at in addresses if now - self._standing(at).probed_at >= _PROBE_AFTER]
        for address in due:
            self._standing(address).probed_at = now
        return due

    def probed(self, address: Address, num_bytes: int, seconds: float) -> None:
        """Pages came that nobody waited for; a link that has become faster is measured anew."""
        link = self._standing(address).link
        if seconds < _FASTER * link.each * num_bytes:
            link.forget()
