# SPDX-License-Identifier: Apache-2.0
"""Links between Macs: what is published or assumed of them, and what a step over them takes."""

from __future__ import annotations

from dataclasses import dataclass

#: Bytes of an element of hidden states on the way between ranks.
ELEMENT = 2


@dataclass(frozen=True)
class Link:
    """What TCP, or RDMA, gets of a link. docs/several-macs.md says where the figures are from."""

    name: str
    rate: float  # bytes a second, each way
    latency: float  # seconds until a few bytes are there

    def seconds(self, nbytes: float) -> float:
        """How long a message takes."""
        return self.latency + nbytes / self.rate


RDMA = Link("TB5, RDMA", 9.4e9, 5e-6)
THUNDERBOLT_5 = Link("TB5, IP", 4.1e9, 0.2e-3)
THUNDERBOLT_4 = Link("TB4, IP", 2.05e9, 0.2e-3)
TEN = Link("10 GbE", 1.18e9, 0.2e-3)
ONE = Link("1 GbE", 0.118e9, 0.2e-3)
WIFI = Link("Wi-Fi 6", 0.1e9, 4e-3)
#: Macs that RDMA joins at most: each is cabled to all others, and an M4 Max has four such ports.
MESH = 5
LINKS = (RDMA, THUNDERBOLT_5, THUNDERBOLT_4, TEN, ONE, WIFI)


def by_layers_bytes(hidden: int, rows: int = 1) -> int:
    """Bytes that cross one boundary between ranks in a step of so many rows."""
    return rows * hidden * ELEMENT


def by_layers_seconds(link: Link, macs: int, hidden: int, rows: int = 1) -> float:
    """What the link adds to a step by layers: hidden states on, and tokens back to the first."""
    return (macs - 1) * link.seconds(by_layers_bytes(hidden, rows)) + link.latency


def bubble(macs: int, batches: int = 1) -> float:
    """Share of the ranks' time that they wait, at so many batches on their way and equal parts."""
    return max(0.0, 1 - batches / macs)


def by_heads_bytes(hidden: int, layers: int, macs: int, rows: int = 1) -> float:
    """Bytes that each Mac sends in a step: two all-reduces a layer, around a ring.

    A ring's all-reduce sends each element 2 (n - 1) / n times (Patarasuk and Yuan 2009, Bandwidth
    optimal all-reduce algorithms for clusters of workstations).
    """
    return 2 * layers * rows * hidden * ELEMENT * 2 * (macs - 1) / macs


def by_heads_seconds(link: Link, macs: int, hidden: int, layers: int, rows: int = 1) -> float:
    """What the link adds to a step by heads: 2 (n - 1) messages an all-reduce, one after another.

    Over RDMA all Macs are cabled to each other, and send to all at once: one message.
    """
    messages = 1 if link is RDMA else 2 * (macs - 1)
    return 2 * layers * messages * link.latency + (
        by_heads_bytes(hidden, layers, macs, rows) / link.rate
    )
