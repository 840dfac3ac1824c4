# SPDX-License-Identifier: Apache-2.0
"""Advice about macOS's local network privacy, for that error only."""

import errno
import os
import sys

import pytest

from vllm_metal.settings import local_network


def wrapped(error):
    """Wraps an error like a library."""
    try:
        try:
            raise error
        except OSError:
            raise RuntimeError("cannot connect")  # noqa: B904 (without a cause, as redis does)
    except RuntimeError as raised:
        return raised


@pytest.mark.parametrize("wrap", [lambda error: error, wrapped])
@pytest.mark.parametrize(
    ("system", "number", "told"),
    [
        ("darwin", errno.EHOSTUNREACH, True),
        ("darwin", errno.ECONNREFUSED, False),
        ("linux", errno.EHOSTUNREACH, False),
    ],
)
def test_advice(monkeypatch, wrap, system, number, told):
    monkeypatch.setattr(sys, "platform", system)
    found = local_network.advice(wrap(OSError(number, os.strerror(number))))
    assert ("System Settings > Privacy & Security > Local Network" in found) == told
    assert bool(found) == told
