# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/mac_attention.py reckons: by hand, beside the proxy, and on the page."""

from dataclasses import replace
from itertools import pairwise

import pytest
from _macs import BY_NAME, CHIPS
from mac_attention import (
    LATENT,
    MLX,
    MLX_CHIP,
    PAGE,
    Kind,
    Needed,
    check_table,
    markdown,
    rewrite,
    shares_table,
    slots,
)
from metal_interpreter.proxy import FAST_SUM, SLOW_SUM

from tests.metal_kernels import mlx_attention, proxy_page
from tests.metal_kernels.budgets import measured


def test_slots_that_memory_leaves_by_hand() -> None:
    chip = BY_NAME["M4 Max"]
    assert chip.bytes_a_cycle == pytest.approx(546e9 / 40 / 1.58e9)
    assert chip.slots(512) == pytest.approx(4 * 512 / 8.64, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        (Kind("128", 16), 2 * 128 * 2),
        (Kind("128", 8), 2 * (128 + 2)),
        (Kind(LATENT, 16), (512 + 64) * 2),
        (Kind(LATENT, 8), 512 + 64 + 2),
    ],
    ids=str,
)
def test_bytes_of_a_key_by_hand(kind, nbytes) -> None:
    assert kind.key_bytes == nbytes


def test_every_eight_heads_are_a_tile_with_slots_of_its_own() -> None:
    one = Kind("128", 16).needed
    assert Kind("128", 16, 5).needed == one
    assert Kind("128", 16, 12).needed == Needed(2 * one.fast, 2 * one.slow)


def test_slots_are_those_of_the_proxys_table() -> None:
    """Those of tiles of eight rows."""
    written = proxy_page.written().values()
    small = {f"decode, {heads}" for heads in ("1 head", "4 heads", "8 heads")}
    rows = [row for row in written if row.what in small or row.size == LATENT]
    found = {(row.size, row.bits): Needed(*row.slots) for row in rows if "decode" in row.what}
    assert found == slots()
    assert found


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(one, id=f"{one.size}-{one.heads}", marks=pytest.mark.more if place else ())
        for place, one in enumerate(MLX)
    ],
)
def test_slots_of_mlxs_kernel_are_what_the_proxy_counts(one) -> None:
    known = next(call for call in mlx_attention.CALLS if call.size.startswith("128, 4 keys"))
    figures = measured(replace(known, arguments=(one.size, one.size, 4)).call())
    for of_sum, counted in ((FAST_SUM, one.needed.fast), (SLOW_SUM, one.needed.slow)):
        assert one.heads * figures.slots(of_sum) / known.keys == pytest.approx(counted, rel=0.01)


def test_what_was_measured_of_mlxs_kernel_follows_from_sums_of_ten_and_a_half_slots() -> None:
    for one in MLX:
        left = MLX_CHIP.slots(4 * one.size)
        assert min(left / one.needed.slow, 1) == pytest.approx(one.measured, abs=0.025)
        if one.measured < 0.9:
            assert left / one.needed.fast > one.measured + 0.05


def test_chips_grow_with_their_names() -> None:
    by_generation: dict[str, list] = {}
    for chip in CHIPS:
        by_generation.setdefault(chip.generation, []).append(chip)
    assert list(by_generation) == ["M1", "M2", "M3", "M4", "M5"]
    for chips in by_generation.values():
        for small, large in pairwise(chips):
            assert small.cores < large.cores
            assert small.bandwidth < large.bandwidth
            assert small.memory < large.memory


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert shares_table() in page, "run python benchmarks/mac_tokens.py --write"
    assert check_table() in page


def test_tables_are_rewritten_where_their_heads_are(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n| x | y |\n| --- | ---: |\n| 1 | 2 |\n\nb\n")
    rewrite(page, [markdown(["x", "y"], [["3", "4"], ["5", "6"]])])
    assert page.read_text() == "a\n\n| x | y |\n| --- | ---: |\n| 3 | 4 |\n| 5 | 6 |\n\nb\n"
    with pytest.raises(ValueError, match="0 tables"):
        rewrite(page, [markdown(["z", "y"], [])])
