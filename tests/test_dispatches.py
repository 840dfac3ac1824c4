# SPDX-License-Identifier: Apache-2.0
"""Dispatches of a step are counted as MLX makes them, and match the page."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests import dispatches
from vllm_metal.cli.fit.graph import record, recordable


def counted(build, *inputs):
    with recordable(metal=True):
        return dispatches.dispatches(record(build, inputs))


def test_views_are_none_and_chains_are_one():
    x = mx.zeros((4, 8))
    assert counted(lambda x: [x.reshape(8, 4).T[:2]], x) == 0
    assert counted(lambda x: [(x * 2 + 1) / x], x) == 1
    assert counted(lambda x: [x @ x.T], x) == 1
    assert counted(lambda x: [mx.concatenate([x, x + 1])], x) == 3
    assert counted(lambda x: [mx.fast.rms_norm(x, None, 1e-5) + x], x) == 2
    # An operation after a product that waits for a sum is no part of it.
    assert counted(lambda x: [(s := x + 1) + s @ mx.zeros((8, 8))], x) == 3


def test_a_layer_of_llama_is_what_a_hand_counts():
    """Seven products, two norms, a write, attention, its join, the gate and two sums."""
    assert dispatches.count("llama").layer == 7 + 2 + 1 + 2 + 1 + 2


@pytest.mark.parametrize("family", dispatches.FAMILIES)
def test_a_step_has_two_dispatches_less_for_each_layer_that_attends(family):
    before, now = (dispatches.count(family, rotates) for rotates in (False, True))
    attending = 32 if family != "qwen3_5" else 8
    saved = 4 if family == "qwen3_5" else 2  # of heads that are rotated in part MLX copies first
    assert before.step - now.step == attending * saved
    assert now.buffers <= before.buffers


def test_a_rotation_that_something_else_reads_is_done_by_mlx_as_well():
    rope, rows = nn.RoPE(8), mx.zeros((4, 2, 1, 8))
    assert counted(lambda x: [rope(x, offset=mx.arange(4))], rows) == 2  # and the positions


def test_the_page_has_these_counts():
    page = dispatches.PAGE.read_text(encoding="utf-8")
    assert dispatches.written(page) == page
