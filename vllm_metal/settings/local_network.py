# SPDX-License-Identifier: Apache-2.0
"""Advises what to do where macOS keeps a server from other machines of its network.

Since macOS 15 a program needs leave to reach the local network. One without it gets EHOSTUNREACH,
as if the other machine were off. Daemons of launchd, root, and what is started from Terminal or
over SSH are exempt; agents of launchd are not (Apple, TN3179, "Understanding local network
privacy").
"""

from __future__ import annotations

import errno
import sys

_ADVICE = (
    "macOS 15 and newer say this, too, where a program may not reach the local network: allow it "
    "in System Settings > Privacy & Security > Local Network, or start the server from Terminal or "
    "as a launchd daemon"
)


def advice(error: BaseException) -> str:
    """What a user may do about a connection that could not be made; empty where nothing is known.

    Args:
        error: an OSError, or what a library raised in its place.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno == errno.EHOSTUNREACH:
            return _ADVICE if sys.platform == "darwin" else ""
        seen = seen.__cause__ or seen.__context__
    return ""
