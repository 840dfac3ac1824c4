# SPDX-License-Identifier: Apache-2.0
"""Ages and fingerprints as people write them."""

from argparse import ArgumentTypeError

import pytest

from vllm_metal.commands.cache import units


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("45m", 2700), ("1.5w", 907_200)]
)
def test_ages(text, seconds):
    assert units.age(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "30 days", "30x"])
def test_what_is_no_age(text):
    with pytest.raises(ArgumentTypeError, match="30d"):
        units.age(text)


def test_fingerprints():
    assert units.fingerprint("0af3") == "0af3"
    for text in ("", "xyz", "../aa", "AA"):
        with pytest.raises(ArgumentTypeError, match="cache ls"):
            units.fingerprint(text)
