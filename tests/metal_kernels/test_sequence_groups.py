# SPDX-License-Identifier: Apache-2.0
"""Plans of equally shaped steps differ only in arrays, and name end states' blocks."""

import numpy as np

from metal_kernels.plan_arrays import all_else
from metal_kernels.sequence_groups import plan
from tests.metal_kernels.sequence_traffic import (
    Request,
    Traffic,
    Turn,
    settled_requests,
    verification,
)


def test_steps_of_one_shape_have_one_key():
    rng, keys = np.random.default_rng(5), set()
    for _ in range(10):
        traffic = Traffic(rng, 1000)
        traffic.num_kept = 24
        accepted = rng.integers(0, 4, 8).tolist()
        step = verification(traffic, settled_requests(), accepted)
        arrays = []
        keys.add(all_else(plan(*step.arguments), arrays))
    assert len(keys) == 1
    other = traffic.step(settled_requests(), [Turn(1, 2, 0)] * 8)
    assert all_else(plan(*other.arguments), []) not in keys


def test_prompts_go_apart_from_decode():
    requests = [Request(settled=9, block=50), Request(), Request(settled=5, block=51), Request()]
    turns = [Turn(1), Turn(300), Turn(1), Turn(290)]
    planned = plan(*Traffic(np.random.default_rng(0), 1000).step(requests, turns).arguments)
    assert [(group.size, group.length) for group in planned.groups] == [(2, 1), (2, 300)]


def test_each_last_and_each_full_block_is_named_once():
    traffic = Traffic(np.random.default_rng(0), 4, nulls=0)
    ends_at_a_block, goes_on = Request(), Request()
    step = traffic.step(
        [ends_at_a_block, goes_on, Request()], [Turn(8), Turn(9), Turn(3, 0, 0, False)]
    )
    planned = plan(*step.arguments)
    written = [*ends_at_a_block.blocks.values(), *goes_on.blocks.values()]
    assert len(written) == 5
    assert sorted(planned.ends_blocks_np.tolist()) == sorted(written)
