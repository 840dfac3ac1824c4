# SPDX-License-Identifier: Apache-2.0
"""The demo's check of its prefix-cache hits."""

import pytest
from demo import TurnStats, missed_hits


@pytest.mark.parametrize(("cached", "wrong"), [(0, True), (16, True), (32, False), (48, False)])
def test_demo_wants_all_full_blocks_of_the_turn_before(cached: int, wrong: bool) -> None:
    before = TurnStats(37, 0, 5, 0.1, 0.1)
    now = TurnStats(60, cached, 5, 0.1, 0.1)
    assert bool(missed_hits(2, now, before, block_size=16)) == wrong
