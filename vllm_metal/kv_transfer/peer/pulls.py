# SPDX-License-Identifier: Apache-2.0
"""Decides whether to pull a peer's pages or to compute their tokens, and limits a pull's time.

It pulls if that is estimated to end first, from two running averages: a peer's bytes per second,
and this engine's prefill tokens per second. An unknown rate counts as infinite, and ties pull: the
first requests pull, which measures the link; then one computes, which measures prefill.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from vllm_metal.identity.fingerprint import PoolContent
from vllm_metal.metrics.metric import Metric
from vllm_metal.settings.address import Address

logger = init_logger(__name__)

#: Seconds that a pull may be late compared to computing.
SLACK_S = 1.2
#: Factor of all earlier measurements when another one is added.
_DECAY = 0.9
#: Measurements until a rate counts: the first one includes one-time costs.
_LEAST_MEASURED = 2
#: Prefill tokens of a measured step: with fewer, the step's fixed time hides the rate.
_LEAST_TOKENS = 64
#: Seconds after which a link's rate is forgotten, so that it is tried again.
_FORGOTTEN_AFTER = 60.0
#: Peers that save as much as the best one, less this part of its pull, take turns.
_AS_GOOD = 0.1
#: Longest pull, in seconds, if its failure would leave nothing; see `Patience`.
_LONGEST_AT_RISK = 1.0
#: Seconds that a peer is avoided after a failed load; doubled with each further one, and the limit.
_AVOIDED, _AVOIDED_MOST = 10.0, 300.0
_CHOICES = "vllm:kv_pull_choices"
_CHOSEN = "Requests with pages at a peer, by the choice estimated to be faster."


class Rate:
    """Running average of units per second, weighted by size, favoring recent measurements."""

    def __init__(self) -> None:
        self._units = self._seconds = 0.0
        self._count = 0

    def add(self, units: float, seconds: float) -> None:
        """Adds a measurement; both values are positive."""
        self._units = _DECAY * self._units + units
        self._seconds = _DECAY * self._seconds + seconds
        self._count += 1

    @property
    def seconds_per_unit(self) -> float:
        """Seconds per unit; 0 if unknown."""
        return self._seconds / self._units if self._count >= _LEAST_MEASURED else 0.0


@dataclass
class _Link:
    """State of a peer, with times as for `Puller`."""

    rate: Rate = field(default_factory=Rate)  # bytes per second
    measured_at: float = float("-inf")
    used_at: float = float("-inf")
    num_failures: int = 0  # failed loads since the last success
    avoided_until: float = float("-inf")


class Patience:
    """Limits a load's wait for peers to `SLACK_S` seconds more than computing the pages would take.

    Only time spent fetching counts, not the engine's own delays.
    """

    # A request keeps the leading pages that came, and computes the rest, so this bounds its delay.

    def __init__(
        self, page_seconds: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            page_seconds: seconds to compute a page; 0 if a failed load keeps no pages; None:
                unknown, so that the limit applies to each fetch.
            clock: returns seconds.
        """
        self.page_seconds = page_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._num_reading = 0  # active fetches
        self._num_pages = 0  # fetched or being fetched
        self._spent = 0.0  # seconds of fetching until `_since`
        self._since = 0.0

    def __reduce__(self) -> tuple[type[Patience], tuple[float | None]]:
        return Patience, (self.page_seconds,)

    @contextmanager
    def fetching(self, num_pages: int) -> Iterator[None]:
        """Measures a fetch of this many pages; thread-safe."""
        with self._lock:
            self._count()
            self._num_reading += 1
            self._num_pages += num_pages
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._num_reading -= 1
                if self.page_seconds is None:
                    self._spent = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the load has waited too long, and its request should compute missing tokens."""
        with self._lock:
            self._count()
            return self._spent > SLACK_S + (self.page_seconds or 0.0) * self._num_pages

    def _count(self) -> None:
        now = self._clock()
        if self._num_reading:
            self._spent += now - self._since
        self._since = now


@dataclass(frozen=True)
class PullHint:
    """Data for the worker's load: which peer has each page, and how long to wait for it."""

    peers: Mapping[bytes, Address]  # peer by key
    patience: Patience | None = None  # None: as long as data arrives


@dataclass(frozen=True, kw_only=True)
class PullCounts:
    """Numbers of decisions to pull and to compute, and of failed pulls."""

    pulled: int = Metric("total", _CHOICES, _CHOSEN, label=("choice", "pulled")).field(0)
    computed: int = Metric("total", _CHOICES, _CHOSEN, label=("choice", "computed")).field(0)
    failed: int = Metric(
        "total", "vllm:kv_pulls_failed", "Pulls that failed or did not return all pages in time."
    ).field(0)


@dataclass
class Pull:
    """The peer chosen for a request, and the pages that it has."""

    address: Address
    keys: frozenset[bytes]
    num_bytes: int | None = None  # bytes that the worker loads; None: no active load
    began_at: float = 0.0


class Puller:
    """Decides and measures pulls, in the scheduler's thread. `now` is the time in seconds."""

    def __init__(self, content: PoolContent) -> None:
        self._links: dict[Address, _Link] = {}
        self._pending_bytes = 0  # bytes of active pulls
        self._last_end = float("-inf")
        self._counts = dict.fromkeys(PullCounts.__annotations__, 0)
        self.use(content)

    def use(self, content: PoolContent) -> None:
        """Sets the pages' size and tokens, and resets this engine's measured prefill rate."""
        self._page_bytes = content.page_bytes
        self._block_tokens = int(content.fingerprint.facts["block_size"])
        self._prefill = Rate()

    @property
    def counts(self) -> PullCounts:
        """Counts of decisions and failures."""
        return PullCounts(**self._counts)

    def computed(self, tokens: int, seconds: float) -> None:
        """Adds a step's prefilled tokens and the seconds it took on the device."""
        if tokens >= _LEAST_TOKENS and seconds > 0.0:
            self._prefill.add(tokens, seconds)

    def is_usable(self, address: Address, now: float) -> bool:
        """Returns whether a peer may be asked, that is, is not avoided after failures."""
        return address not in self._links or now >= self._links[address].avoided_until

    def retain(self, addresses: Collection[Address]) -> None:
        """Forgets the peers whose address is not in `addresses`."""
        self._links = {at: link for at, link in self._links.items() if at in addresses}

    def decide(
        self, keys: Sequence[bytes], found: Mapping[Address, Collection[bytes]], now: float
    ) -> Pull | None:
        """Returns the best pull that is estimated to beat computing; None if there is none.

        Args:
            keys: pages that a request could load, in order within each KV cache group.
            found: pages that each peer has.
        """
        # A step's fixed time cancels out, as a request computes its last token in any case.
        pages: dict[Address, list[bytes]] = {}
        seconds: dict[Address, float] = {}  # seconds of a pull, after the active ones
        saved: dict[Address, float] = {}
        for address, there in found.items():
            tokens, usable = self._usable(keys, there)
            if tokens:
                link = self._links.setdefault(address, _Link())
                if now - link.measured_at >= _FORGOTTEN_AFTER:
                    link.rate = Rate()
                pages[address] = usable
                queued = self._pending_bytes + self._num_bytes(usable)
                seconds[address] = link.rate.seconds_per_unit * queued
                saved[address] = self._prefill.seconds_per_unit * tokens - seconds[address]
        if not pages:
            return None
        longest = float("inf") if self._keeps_part else _LONGEST_AT_RISK
        faster = [at for at in pages if saved[at] >= 0.0 and seconds[at] <= longest]
        self._counts["pulled" if faster else "computed"] += 1
        if not faster:
            return None
        best = max(faster, key=saved.__getitem__)
        as_good = saved[best] - _AS_GOOD * seconds[best]
        chosen = min(
            (at for at in faster if saved[at] >= as_good), key=lambda at: self._links[at].used_at
        )
        self._links[chosen].used_at = now
        return Pull(chosen, frozenset(pages[chosen]))

    @property
    def _keeps_part(self) -> bool:
        """Whether a request keeps the leading pages of a failed load."""
        return len(self._page_bytes) == 1

    def _usable(self, keys: Sequence[bytes], there: Collection[bytes]) -> tuple[int, list[bytes]]:
        """Returns usable pages' tokens, and these pages: each group's first ones, up to a gap."""
        # For a group that only needs its last pages, a peer may have no others.
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

    def _num_bytes(self, keys: Sequence[bytes]) -> int:
        return sum(self._page_bytes[get_offload_group_idx(OffloadKey(key))] for key in keys)

    # -- progress of pulls

    def begin(self, pull: Pull, keys: Sequence[bytes], now: float) -> PullHint | None:
        """Starts a pull of the `keys` that the peer has; None if the peer has none of them."""
        wanted = [key for key in keys if key in pull.keys]
        if not wanted:
            return None
        pull.num_bytes, pull.began_at = self._num_bytes(wanted), now
        self._pending_bytes += pull.num_bytes
        page_seconds = (
            self._prefill.seconds_per_unit * self._block_tokens if self._keeps_part else 0.0
        )
        is_known = page_seconds > 0.0 or not self._keeps_part
        patience = Patience(page_seconds if is_known else None)
        return PullHint(dict.fromkeys(wanted, pull.address), patience)

    def give_up(self, pull: Pull) -> None:
        """Ends a pull that is no longer wanted; it counts as neither success nor failure."""
        self._pending_bytes -= pull.num_bytes or 0
        pull.num_bytes = None

    def end(self, pull: Pull, failed: bool, now: float) -> None:
        """Ends a pull; measures the peer's rate, or avoids a peer that failed for a while."""
        num_bytes = pull.num_bytes
        if num_bytes is None:
            return
        self.give_up(pull)
        link = self._links.setdefault(pull.address, _Link())
        # Pulls are read one after the other, so this one's time starts at the end of the last one.
        seconds = now - max(pull.began_at, self._last_end)
        self._last_end = now
        if not failed:
            link.num_failures = 0
            if seconds > 0.0:
                link.rate.add(num_bytes, seconds)
                link.measured_at = now
            return
        self._counts["failed"] += 1
        link.num_failures += 1
        avoided = min(_AVOIDED * 2 ** (link.num_failures - 1), _AVOIDED_MOST)
        link.avoided_until = now + avoided
        if link.num_failures == 1:
            logger.warning(
                "Peer %s did not send all pages in time; it is not used for a while",
                pull.address,
            )
