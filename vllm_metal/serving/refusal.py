# SPDX-License-Identifier: Apache-2.0
"""Refusal: an error response of our own, in the form of vLLM's errors."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse


class Refusal(Exception):
    """Rejects a request. The client gets the message, so it must not contain what was sent."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def response(self) -> JSONResponse:
        """Returns the error as vLLM formats it."""
        error = {
            "message": self.message,
            "type": HTTPStatus(self.status).phrase,
            "param": None,
            "code": self.status,
        }
        unknown = self.status == HTTPStatus.UNAUTHORIZED
        headers = {"www-authenticate": "Bearer"} if unknown else None
        return JSONResponse({"error": error}, self.status, headers)
