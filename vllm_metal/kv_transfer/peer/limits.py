# SPDX-License-Identifier: Apache-2.0
"""Limits of the protocol: sizes, timeouts, and the duration of leases."""

from __future__ import annotations

from dataclasses import dataclass

#: Incremented when messages or their order change.
PROTOCOL_VERSION = 3

#: Bytes of a message before authentication; the longest has 100.
MAX_UNKNOWN_BYTES = 4 << 10
#: Bytes of any other message: twice the largest number of the longest keys.
MAX_MESSAGE_BYTES = 4 << 20
#: Keys per message: a prompt of 256k tokens in blocks of 16, in two KV cache groups.
MAX_KEYS = 32 << 10
MAX_KEY_BYTES = 64  # as on disk; vLLM's have 36
#: Bytes of a fingerprint's facts as JSON; a model of 60 layers has some 10 KB.
MAX_FACTS_BYTES = 256 << 10
#: Peers per engine.
MAX_PEERS = 64
#: Threads and sockets that peers can make a server hold; each peer uses at most seven.
MAX_CONNECTIONS = 32
#: Additional connections that are not authenticated yet, which takes some milliseconds.
MAX_UNAUTHENTICATED = 32
#: Connections per peer: two threads that load, four lookups, and the thread that renews leases.
CONNECTIONS_OF_A_PEER = 7


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds, which bound every wait for a dead, stuck or hostile engine."""

    #: For a TCP connection; machines on the same network answer in milliseconds or are gone.
    connect: float = 2.0
    #: For a connection that moves less than `LEAST_PROGRESS_BYTES`. Longer than a pause for garbage
    #: collection or a step.
    no_progress: float = 5.0
    #: For each message until the secret is proved.
    authenticate: float = 3.0
    #: Duration of leases without renewal.
    lease: float = 30.0
    #: Interval of renewals: two of three may be late or lost.
    renew: float = 10.0
    #: Longest that leases are renewed without another lookup: loads take seconds, and a forgotten
    #: request must not hold the other engine's memory.
    longest_lease: float = 300.0
    #: Back-off after a peer could not be reached.
    down: float = 10.0
    #: Back-off after a peer was refused, which takes a restart of either engine to fix.
    refused: float = 60.0
    #: Longest that a server waits for pages being produced; an engine copies them out of its pool a
    #: few steps after it computed them.
    wait: float = 10.0
    #: Interval of a server's `Waiting` messages.
    waiting_interval: float = 1.0


TIMEOUTS = Timeouts()
#: For an engine that could compute, and checks whether peers would be faster.
SHORT_TIMEOUTS = Timeouts(connect=1.0, no_progress=1.5, down=3.0)

#: Bytes that must move in `Timeouts.no_progress` seconds, unless less is left of a page: 13 KB/s.
#: A slower peer does not help a request that could compute.
LEAST_PROGRESS_BYTES = 64 << 10
