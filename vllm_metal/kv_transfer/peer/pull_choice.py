# SPDX-License-Identifier: Apache-2.0
"""Whether pages are pulled, and from whom, or their tokens computed: whatever is over sooner.

Either way a request computes its last token, so a step's fixed time cancels: a pull of so many
tokens saves what the device takes for each of them, and costs the wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from vllm_metal.kv_transfer.peer.line import Line

#: Offers that take no longer than the best by this factor are as good, and take turns.
_AS_GOOD = 1.1
#: Seconds of a pull that are worth knowing whether computing takes less.
_FELT = 0.02

T = TypeVar("T")


@dataclass(frozen=True)
class Offer:
    """What one peer has of a request."""

    tokens: int  # that would not be computed
    num_bytes: int
    link: Line  # seconds of pulls from there, by bytes
    used_at: float  # when it was chosen last, on any clock


@dataclass(frozen=True)
class Circumstances:
    """What holds for all offers."""

    compute: Line  # seconds of the device, by tokens of prompts
    wait: float = 0.0  # seconds until pulls that go on are over
    byte_seconds: float = 0.0  # that this engine takes for each byte at least, beside streams
    longest: float = float("inf")  # seconds that a pull may take


def choose(offers: Mapping[T, Offer], now: Circumstances) -> tuple[T, float] | None:
    """Returns whose offer is taken, and the seconds that it is thought to take; None: compute.

    Who was not measured yet is taken, and so measured. Where computing was not, a request computes
    if the pull would be felt.

    Args:
        offers: by peer; those of no tokens are nothing.
        now: what holds for all.
    """
    given = {peer: offer for peer, offer in offers.items() if offer.tokens > 0}
    seconds = {peer: _seconds(offer, now) for peer, offer in given.items()}
    new = [peer for peer, offer in given.items() if not offer.link.knows(offer.num_bytes)]
    if new:
        peer = max(new, key=lambda each: (given[each].tokens, -given[each].used_at))
        return peer, seconds[peer]
    saved = {
        peer: now.compute.each * given[peer].tokens - now.wait - took
        for peer, took in seconds.items()
        if took <= now.longest
    }
    if not saved:
        return None
    best = max(saved, key=saved.__getitem__)
    is_known = now.compute.knows(given[best].tokens)
    if saved[best] <= 0.0 if is_known else now.wait + seconds[best] > _FELT:
        return None
    as_good = saved[best] - (_AS_GOOD - 1.0) * seconds[best]
    peer = min(
        (peer for peer in saved if saved[peer] >= as_good), key=lambda each: given[each].used_at
    )
    return peer, seconds[peer]


def _seconds(offer: Offer, now: Circumstances) -> float:
    return max(offer.link.at(offer.num_bytes), offer.num_bytes * now.byte_seconds)
