# SPDX-License-Identifier: Apache-2.0
"""Sizes, ages and fingerprints as people write them."""

from argparse import ArgumentTypeError

import pytest

from vllm_metal.cli import units


@pytest.mark.parametrize("text", ["24GB", "24 GB", "24gb", "24G", "24GiB", " 24 GiB "])
def test_memory_is_in_the_units_macs_are_sold_by(text):
    assert units.memory(text) == 24 * 2**30


def test_other_units_of_memory():
    assert units.memory("512MB") == 512 * 2**20
    assert units.memory("0.5TB") == 512 * 2**30


@pytest.mark.parametrize(("text", "count"), [("32k", 32768), ("32K", 32768), ("1M", 2**20)])
def test_tokens_in_thousands_are_in_1024s(text, count):
    assert units.tokens(text) == count


def test_plain_numbers_of_tokens():
    assert units.tokens("32000") == 32000
    assert units.count("4") == 4
    assert units.share("0.9") == 0.9


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.memory, "24"),  # of what?
        (units.memory, "24XB"),
        (units.memory, "much"),
        (units.memory, "0GB"),
        (units.memory, "-24GB"),
        (units.tokens, "32kB"),
        (units.tokens, "0"),
        (units.tokens, ""),
        (units.count, "0"),
        (units.count, "1.5"),
        (units.share, "0"),
        (units.share, "92"),
        (units.share, "nan"),
    ],
)
def test_what_is_no_size_is_named(parse, text):
    with pytest.raises(ArgumentTypeError, match=repr(text)):
        parse(text)


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
