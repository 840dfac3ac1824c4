# SPDX-License-Identifier: Apache-2.0
"""Selection of prompts for MLX's function, and the blocks that get a state.

That they compute the same, tests/engine/recurrent/test_sequence_state.py shows.
"""

import mlx.core as mx
import numpy as np

from metal_kernels.sequences import Sequences
from vllm_metal.engine.recurrent import long_prompts
from vllm_metal.engine.recurrent.long_prompts import Prompt

SIZE, FEWEST = 8, 20
# First row, rows, certain, first kept, kept, position, read, write, keep at; blocks by number.
SHORT = [0, 19, 19, 0, 0, 0, 0, 1, 0], [1, 2, 3, 0]
BEGINS = [19, 20, 20, 0, 0, 0, 9, 6, 0], [4, 5, 6, 0]
GOES_ON = [39, 21, 21, 0, 0, 3, 7, 8, 0], [7, 0, 8, 0]  # up to a block's end
DRAFTS = [60, 30, 29, 0, 0, 0, 0, 1, 0], [1, 2, 3, 4]
KEPT = [90, 30, 30, 0, 1, 1, 1, 1, 0], [1, 2, 3, 4]
NOWHERE = [120, 20, 20, 0, 0, 8, 9, 0, 0], [0, 0, 0, 0]


def chosen(*requests):
    tables, blocks = (np.array(part, np.int32) for part in zip(*requests, strict=True))
    tiles = mx.zeros((len(requests), 2), mx.int32)
    step = Sequences(mx.array(tables), mx.array(blocks), tiles, SIZE, 140, 1)
    return long_prompts.chosen(step, tables, blocks, FEWEST)


def test_the_host_knows_all_of_a_long_prompt():
    found = chosen(SHORT, BEGINS, GOES_ON, DRAFTS, KEPT, NOWHERE)
    assert found.prompts == (
        Prompt(19, 0, ((8, 4), (16, 5), (20, 6))),
        Prompt(39, 7, ((5, 7), (21, 8))),
        Prompt(120, 9, ((20, 0),)),
    )
    left = np.array(found.others.table)
    assert not left[[1, 2, 5]].any()
    np.testing.assert_array_equal(left[[0, 3, 4]], [SHORT[0], DRAFTS[0], KEPT[0]])


def test_there_may_be_none():
    assert chosen(SHORT, DRAFTS, KEPT) is None
