# SPDX-License-Identifier: Apache-2.0
"""Default limits."""

import shutil
from collections import namedtuple

import pytest
from kv_transfer.disk import naive

from vllm_metal.kv_transfer.disk.limits import DEFAULT_DAILY_WRITE_BYTES, default_max_bytes

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "expected"), [(100 * 10**9, 10 * 10**9), (500 * 10**9, 50 * 10**9), (4 * 10**12, 50e9)]
)
def test_a_tenth_of_what_is_free_and_50_gb_at_most(tmp_path, monkeypatch, free, expected):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
    assert default_max_bytes(tmp_path / "not" / "there" / "yet") == expected


def test_what_the_cache_holds_counts_as_free(root, monkeypatch, make_cache):
    cache = make_cache()
    folder = cache.blocks(naive.FINGERPRINT, naive.FACTS)
    folder.write(naive.key(1), naive.block(1), 0.0, 0)
    cache.close()
    free = 10**9 - naive.room(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, free))
    assert default_max_bytes(root) == pytest.approx(10**8, abs=4096)


def test_the_daily_budget_keeps_a_drive_of_150_tbw_for_five_years_beside_as_much_again():
    assert 2 * DEFAULT_DAILY_WRITE_BYTES * 365 * 5 <= 150e12
