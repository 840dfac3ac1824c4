# SPDX-License-Identifier: Apache-2.0
"""Available memory of a Mac, from consistent page counts."""

from dataclasses import replace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mac import BUSY, FULL, IDLE, PAGE, Mac

from vllm_metal.device import ram

GIB = 2**30


@st.composite
def macs(draw):
    """Draws Macs with 8 to 512 GB."""
    size = draw(st.integers(8, 512)) * GIB
    left = size // PAGE
    shares = {}
    for kind in ("free", "files", "anonymous"):
        shares[kind] = draw(st.integers(0, left))
        left -= shares[kind]
    speculative = draw(st.integers(0, shares["files"]))
    purgeable = draw(st.integers(0, shares["anonymous"]))
    return Mac(**shares, speculative=speculative, purgeable=purgeable, ram=size)


def available(mac, own=0, **options):
    with pytest.MonkeyPatch.context() as monkeypatch:
        mac.take_over(monkeypatch, **options)
        return ram.available(own)


@given(macs())
def test_no_page_is_counted_twice_and_no_figure_is_less_than_psutils(mac):
    """Counts free, file and purgeable pages in full, other anonymous ones by half."""
    whole = mac.free + mac.files + mac.purgeable
    half = (mac.anonymous - mac.purgeable) / 2
    found = available(mac)
    assert found <= mac.pageable * PAGE
    assert found >= mac.psutil_available
    if found > mac.psutil_available:
        # The level is a percentage, rounded down.
        assert (whole + half) * PAGE - mac.ram / 100 - PAGE <= found <= (whole + half) * PAGE


@given(st.integers(0, 5 * GIB // PAGE), st.booleans())
def test_a_model_takes_of_it_what_it_holds_whether_it_is_wired_or_not(pages, wired):
    """macOS gives a model free pages, then files, then halves of compressed pages."""
    before, missing = replace(BUSY, speculative=0), pages
    free = min(before.free, missing)
    files = min(before.files, missing - free)
    compressed = min(2 * (missing - free - files), before.anonymous)
    after = replace(
        before,
        free=before.free - free,
        files=before.files - files,
        anonymous=before.anonymous - compressed + (0 if wired else pages),
    )
    left = available(before) - pages * PAGE
    found = available(after, own=pages * PAGE)
    if not wired:
        assert found == pytest.approx(max(left, after.psutil_available), abs=before.ram / 100)
    else:  # nobody can tell: what is held is taken off again, which errs to the safe side
        assert found <= max(left, after.psutil_available) + before.ram / 100


def test_a_busy_mac_has_more_to_give_than_psutil_says():
    assert BUSY.psutil_available < 4.6 * GIB
    assert 5.4 * GIB < available(BUSY) < 5.6 * GIB
    assert available(FULL) < 3.1 * GIB
    assert available(IDLE) > 11 * GIB


@pytest.mark.parametrize("missing", ram.SYSCTLS)
def test_where_the_kernel_does_not_tell_psutil_does(missing):
    assert available(BUSY, missing=(missing,)) == BUSY.psutil_available


def test_elsewhere_than_on_macos_psutil_does(monkeypatch):
    BUSY.take_over(monkeypatch)
    monkeypatch.setattr("sys.platform", "linux")
    assert ram.available(0) == psutil.virtual_memory().available == BUSY.psutil_available
