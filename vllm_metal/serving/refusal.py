# SPDX-License-Identifier: Apache-2.0
"""Refusal: an answer of our own that says no, in the form of vLLM's errors."""

from __future__ import annotations

from http import HTTPStatus

from starlette.responses import JSONResponse


class Refusal(Exception):
    """A request is not served. The message goes to the client: nothing that it sent is in it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def response(self) -> JSONResponse:
        """The answer, as vLLM's errors have it."""
        error = {
            "message": self.message,
            "type": HTTPStatus(self.status).phrase,
            "param": None,
            "code": self.status,
        }
        unknown = self.status == HTTPStatus.UNAUTHORIZED
        headers = {"www-authenticate": "Bearer"} if unknown else None
        return JSONResponse({"error": error}, self.status, headers)
