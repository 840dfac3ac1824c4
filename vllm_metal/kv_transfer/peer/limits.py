# SPDX-License-Identifier: Apache-2.0
"""Numbers that both sides of a connection keep to: sizes, timeouts, a lease's seconds."""

from __future__ import annotations

from dataclasses import dataclass

#: Raised whenever a message, or the order of messages, changes.
PROTOCOL_VERSION = 3

#: Bytes of a message from somebody who has proved nothing: the longest of them has 100.
MAX_UNKNOWN_BYTES = 4 << 10
#: Bytes of any other message: as many of the longest keys as a message may have, twice.
MAX_MESSAGE_BYTES = 4 << 20
#: Keys of a message: a prompt of 256k tokens in blocks of 16, in two KV cache groups.
MAX_KEYS = 32 << 10
MAX_KEY_BYTES = 64  # as on disk; vLLM's have 36
#: Of a fingerprint's facts as JSON; those of a model of 60 layers have some 10 KB.
MAX_FACTS_BYTES = 256 << 10
#: Peers that an engine asks.
MAX_PEERS = 64
#: Threads and sockets that peers can make a server hold; a peer has seven of them at most.
MAX_CONNECTIONS = 32
#: More of them, which have not proved the secret: a peer needs one for some milliseconds.
MAX_UNPROVEN = 32
#: Of one peer: two threads that load, four questions, and one thread that renews leases.
CONNECTIONS_OF_A_PEER = 7


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Nobody waits longer than this for an engine that is dead, stuck or hostile."""

    #: Until TCP connects; a machine of the same network answers in milliseconds, or is not there.
    connect: float = 2.0
    #: A connection on which nothing moves, or less than `LEAST_PROGRESS_BYTES`, is given up. Longer
    #: than a collector's or a step's pause.
    no_progress: float = 5.0
    #: That somebody has for each message until the secret is proved.
    prove: float = 3.0
    #: How long found pages stay without a sign of life from who asked for them.
    lease: float = 30.0
    #: Between signs of life: two of three may be late or lost.
    renew: float = 10.0
    #: The longest that pages count as asked for: a request's loads take seconds, and one that was
    #: forgotten must not hold the other engine's memory.
    held: float = 300.0
    #: How long a peer that could not be reached is not tried again.
    down: float = 10.0
    #: The same for one that was refused: that takes a restart of one of the two to mend.
    refused: float = 60.0
    #: The longest that a server waits for pages that are being made; an engine copies them out of
    #: its pool a few steps after it computed them.
    wait: float = 10.0
    #: Between a server's signs of life while it waits for pages.
    waiting_sign: float = 1.0


TIMEOUTS = Timeouts()
#: Of an engine that can compute all by itself, and asks whether others would be faster.
HASTY = Timeouts(connect=1.0, no_progress=1.5, down=3.0)

#: That move in `Timeouts.no_progress` seconds at least, or what is left of a page: 13 KB/s. Less
#: is no help to a request that could compute.
LEAST_PROGRESS_BYTES = 64 << 10
