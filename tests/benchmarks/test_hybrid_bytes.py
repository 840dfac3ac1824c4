# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/hybrid_bytes.py reckons, beside what is published and the page that shows it."""

from pathlib import Path

import pytest
from hybrid_bytes import (
    QWEN_27B,
    QWEN_35B,
    SHAPES,
    WEIGHT_BYTES,
    Experts,
    kept_table,
    moved,
    table,
    tokens_a_step,
)

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def weights(shape) -> float:
    """Of the text model, without norms and what else is small."""
    every_expert = shape.mlp(10**6)
    layers = shape.recurrent * shape.projections + shape.attending * shape.attention
    return layers + shape.layers * every_expert + 2 * shape.head


def test_the_shapes_have_the_weights_that_the_names_promise() -> None:
    assert weights(QWEN_27B) == pytest.approx(27e9, rel=0.02)
    assert weights(QWEN_35B) == pytest.approx(35e9, rel=0.02)
    active = weights(QWEN_35B) - 40 * (QWEN_35B.mlp(10**6) - QWEN_35B.mlp(1))
    assert active == pytest.approx(3.4e9, rel=0.05)  # "A3B", the embedding besides


def test_a_state_and_what_is_kept_of_a_draft_by_hand() -> None:
    state = 48 * 128 * 128 * 4 + 3 * 10240 * 2
    kept = (16 * 128 + 48 * 128) * 2 + 10240 * 2 + 2 * 48 * 4
    assert (QWEN_27B.state_bytes, QWEN_27B.kept_bytes) == (state, kept)
    assert kept <= 0.012 * state


def test_experts_that_rows_touch_by_counting() -> None:
    experts = Experts(count=4, chosen=2, width=1, shared_width=1)
    pairs = [{a, b} for a in range(4) for b in range(a)]
    touched = [len(one | other) for one in pairs for other in pairs]
    assert experts.touched(2) == pytest.approx(sum(touched) / len(touched))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_one_call_reads_weights_once_and_moves_one_state_each_way(shape) -> None:
    for drafts in range(9):
        runs, one = moved(shape, drafts, one_call=False), moved(shape, drafts, one_call=True)
        assert runs.recurrent == (drafts + 1) * one.recurrent
        assert one.recurrent == WEIGHT_BYTES * shape.recurrent * shape.projections
        kept = 2 * drafts * shape.recurrent * shape.kept_bytes
        assert one.states - kept == 2 * shape.recurrent * shape.state_bytes
        assert (runs.others, runs.drafting) == (one.others, one.drafting)


def test_tokens_a_step_follow_from_acceptance() -> None:
    assert tokens_a_step(0) == 1
    assert tokens_a_step(3) == pytest.approx((1 - 0.7**4) / 0.3)


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for expected in (*map(table, SHAPES), kept_table()):
        assert expected in page, expected
