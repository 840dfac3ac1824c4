# SPDX-License-Identifier: Apache-2.0
import mlx.core as mx
import numpy as np
from scipy.stats import chisquare

from vllm_metal.engine.sample.random import draw


def test_a_row_depends_on_its_own_key_alone():
    rng = np.random.default_rng(0)
    logits = mx.zeros((8, 5000))
    keys = rng.integers(0, 2**32, (8, 2), dtype=np.uint32)
    tokens = np.array(draw(logits, keys))
    changed = keys.copy()
    changed[3, 1] += 1
    others = [0, 1, 2, 4, 5, 6, 7]
    again = np.array(draw(logits, changed))
    assert (again[others] == tokens[others]).all()
    assert again[3] != tokens[3]
    order = rng.permutation(8)
    assert (np.array(draw(logits, keys[order])) == tokens[order]).all()
    for row in range(8):
        assert draw(logits[:1], keys[row : row + 1]).item() == tokens[row]


def test_a_single_possible_token_is_always_drawn():
    """Noise is finite on both sides: it lifts no removed token and drops no last one."""
    num_draws = 20_000
    logits = np.full((num_draws, 7), -np.inf, dtype=np.float32)
    logits[:, 5] = -1e4
    keys = np.random.default_rng(1).integers(0, 2**32, (num_draws, 2), dtype=np.uint32)
    assert (np.array(draw(mx.array(logits), keys)) == 5).all()


def test_rare_tokens_come_as_often_as_they_should():
    """One token in 4096 against one near-certain one: 1e6 rows, 244 expected. 1e-4 is the chance
    that a right sampler fails, over the choice of keys; they are fixed."""
    num_draws, odds = 1_000_000, 4096
    logits = mx.broadcast_to(mx.array([0.0, -np.log(odds - 1)]), (num_draws, 2))
    keys = np.random.default_rng(2).integers(0, 2**32, (num_draws, 2), dtype=np.uint32)
    rare = int(np.array(draw(logits, keys)).sum())
    expected = num_draws / odds
    assert chisquare([rare, num_draws - rare], [expected, num_draws - expected]).pvalue > 1e-4
