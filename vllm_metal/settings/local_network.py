# SPDX-License-Identifier: Apache-2.0
"""Gives advice when macOS blocks a server from other machines on the local network."""

from __future__ import annotations

import errno
import sys

# Since macOS 15 programs need permission to reach the local network. Without it they get
# EHOSTUNREACH, as if the other machine were off. launchd daemons, root, and programs started from
# Terminal or over SSH are exempt; launchd agents are not (Apple, TN3179, "Understanding local
# network privacy").
_ADVICE = (
    "macOS 15 and newer say this, too, where a program may not reach the local network: allow it "
    "in System Settings > Privacy & Security > Local Network, or start the server from Terminal or "
    "as a launchd daemon"
)


def advice(error: BaseException) -> str:
    """Returns what to do about a failed connection; empty unless macOS may have blocked it.

    `error` is an OSError, or a library's exception that was raised from one.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.EHOSTUNREACH:
            return _ADVICE if sys.platform == "darwin" else ""  # elsewhere the cause is unknown
        seen = seen.__cause__ or seen.__context__
    return ""
