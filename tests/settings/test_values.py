# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write them."""

import pytest

from vllm_metal.settings import values


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (1, 1),
        (50_000_000_000, 50_000_000_000),
        ("50GB", 50 * 10**9),
        ("50 GiB", 50 * 2**30),
        ("50gib", 50 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5 TB", 1_500_000_000_000),
        ("0.3kb", 300),
        ("20G", 20 * 10**9),
        ("123", 123),
        ("7 B", 7),
        (" 9007199254740993 ", 2**53 + 1),  # which no float is
    ],
)
def test_what_a_size_means(given, meant):
    assert values.size(given) == meant


@pytest.mark.parametrize(
    "given",
    [*(0, -1, 1.5, True, None, [], {}), *("", "GB", "-5GB", "0GB", "0.2", "5XB", "1e9", "5 G B")],
)
def test_what_is_no_size_is_named(given):
    with pytest.raises(ValueError, match='"50GB"') as raised:
        values.size(given)
    assert repr(given) in str(raised.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *((1, 1), (0.5, 0.5), ("90s", 90), ("10m", 600), ("10 min", 600), ("1.5h", 5400)),
        ("1D", 86400),
    ],
)
def test_what_a_time_means(given, meant):
    assert values.duration(given) == meant


@pytest.mark.parametrize(
    "given", [0, -1, True, None, [], "", "10", "m", "-5m", "0s", "5ms", "1e9s"]
)
def test_what_is_no_time_is_named(given):
    with pytest.raises(ValueError, match='"10m"') as raised:
        values.duration(given)
    assert repr(given) in str(raised.value)
