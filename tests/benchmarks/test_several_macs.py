# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/several_macs.py reckons: by hand, and on the page."""

import _links
import pytest
import several_macs
from _links import LINKS, RDMA, TEN, WIFI, Link
from _macs import BY_NAME
from _published import DEEPSEEK_V3, LLAMA_70B
from several_macs import Desk

HIDDEN, LAYERS = 8192, 80  # of Llama-3.3-70B


def test_by_layers_a_row_crosses_each_boundary_once() -> None:
    assert _links.by_layers_bytes(HIDDEN) == 16384
    assert _links.by_layers_bytes(HIDDEN, rows=100) == 1638400
    link = Link("slow", 1e6, 0.01)
    assert _links.by_layers_seconds(link, 3, HIDDEN) == pytest.approx(2 * (0.01 + 0.016384) + 0.01)


def test_by_heads_a_ring_sends_each_element_so_often() -> None:
    """Counted: n Macs, n parts, each part goes n - 1 hops to be summed and n - 1 to be known."""
    for macs in (2, 3, 4, 8):
        hops = macs * 2 * (macs - 1)  # of parts, by all Macs together
        sent = hops * (HIDDEN * 2 / macs) / macs
        assert _links.by_heads_bytes(HIDDEN, 1, macs) == pytest.approx(2 * sent)
    link = Link("late", 1e30, 0.001)
    assert _links.by_heads_seconds(link, 4, HIDDEN, LAYERS) == pytest.approx(2 * 80 * 6 * 0.001)
    quick = _links.by_heads_seconds(RDMA, 4, HIDDEN, LAYERS)
    assert quick == pytest.approx(160 * RDMA.latency + 160 * 16384 * 1.5 / RDMA.rate)


@pytest.mark.parametrize(("macs", "batches"), [(2, 1), (2, 2), (3, 2), (4, 1), (4, 6)])
def test_ranks_wait_as_a_table_of_turns_says(macs: int, batches: int) -> None:
    """Each batch is at one rank at a time, and goes round."""
    turns = 12 * macs
    busy = sum(
        min(1, sum((turn - batch) % macs == rank for batch in range(min(batches, macs))))
        for turn in range(turns)
        for rank in range(macs)
    )
    assert _links.bubble(macs, batches) == pytest.approx(1 - busy / (turns * macs))


def desk(macs: int, memory: int = 64) -> Desk:
    return Desk(LLAMA_70B, 4, BY_NAME["M4 Pro"], memory, macs)


def test_one_stream_is_no_faster_by_layers() -> None:
    for link in LINKS:
        assert desk(3).by_layers(link) < 1 / desk(3).alone()
    assert desk(2).by_layers(RDMA) == pytest.approx(1 / desk(2).alone(), rel=0.01)


def test_one_stream_is_faster_by_heads_where_the_link_is_quick() -> None:
    assert desk(2).by_heads(RDMA) > 1.8 / desk(2).alone()
    assert desk(2).by_heads(WIFI) < 1 / desk(2).alone()
    by_hand = desk(2).alone() / 2 + 160 * (2 * TEN.latency + 16384 / TEN.rate)
    assert desk(2).by_heads(TEN) == pytest.approx(1 / by_hand)


@pytest.mark.more
def test_what_one_mac_does_not_hold() -> None:
    """39.7 GB of weights and 1.3 of K/V: of 24 GB the GPU has 16, of 64 more than two thirds."""
    assert not desk(2, memory=24).fits(1)
    assert desk(2, memory=64).fits(1)
    assert all(each.fits(each.macs) for each in several_macs.desks())


def test_heads_have_to_divide() -> None:
    assert desk(4).heads_divide and not desk(3).heads_divide
    latent = Desk(DEEPSEEK_V3, 4, BY_NAME["M4 Max"], 128, 8)
    assert latent.heads_divide  # 128 heads, and the latents are everybody's


@pytest.mark.more
def test_the_page_has_the_tables() -> None:
    page = several_macs.PAGE.read_text(encoding="utf-8")
    for expected in several_macs.tables():
        assert expected in page, "run python benchmarks/several_macs.py --write"
