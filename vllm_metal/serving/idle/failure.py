# SPDX-License-Identifier: Apache-2.0
"""CannotWake: an engine that slept could not take its memory again."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

MESSAGE = (
    "The server returned its memory while it was idle and could not get it back: "
    "another program may use it now. Try again later. Operators: close other "
    "programs; the log has the reason."
)


@dataclass
class Exchange:
    """What became of one request of a server."""

    failed: bool = False


#: Of the request that this task answers.
EXCHANGE: ContextVar[Exchange | None] = ContextVar("idle_exchange", default=None)


class CannotWake(GracefulHTTPError):
    """Raised for a request. The engine sleeps on, and may be able to wake up for the next."""

    def __init__(self) -> None:
        """Notes it in the exchange of this task, where there is one."""
        super().__init__(MESSAGE, HTTPStatus.SERVICE_UNAVAILABLE)
        if (exchange := EXCHANGE.get()) is not None:
            exchange.failed = True
