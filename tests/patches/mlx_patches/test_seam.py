# SPDX-License-Identifier: Apache-2.0
"""Arguments that reach a cache's attention, and rejected ones."""

import mlx.core as mx
import pytest
from engine.attention.test_layers import build
from mlx_lm.models import base

from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.patches.mlx_patches import seam
from vllm_metal.patches.mlx_patches.seam import AttendingCache


class Noting(AttendingCache):
    offset = mx.zeros(1, mx.int32)

    def update_and_fetch(self, keys, values):
        return keys, values

    def attend(self, queries, keys, values, scoring):
        self.seen = scoring.scale, scoring.sinks
        return queries


@pytest.fixture(autouse=True)
def installed():
    seam.install()


def call(cache, mask):
    rows = mx.ones((2, 4, 1, 16))
    sinks = mx.ones(4)
    return base.scaled_dot_product_attention(
        rows, rows, rows, cache=cache, scale=0.5, mask=mask, sinks=sinks
    )


@pytest.mark.parametrize("mask", [None, "causal"])
def test_a_cache_that_attends_is_given_the_call(mask):
    cache = Noting()
    call(cache, mask)
    scale, sinks = cache.seen
    assert scale == 0.5 and sinks.shape == (4,)


@pytest.mark.parametrize("dtype", [mx.bool_, mx.float32], ids=str)
def test_a_mask_that_the_cache_cannot_apply_is_refused_with_the_call_that_gave_it(dtype):
    mask = mx.ones((1, 4, 1, 1), dtype)
    with pytest.raises(NotImplementedError, match=r"test_seam\.call gives attention a mask of its"):
        call(Noting(), mask)


def test_other_caches_get_mlx_lms_own_attention():
    out = call(None, mx.ones((1, 1, 1, 1), mx.bool_))
    # One key, whose score is 0.5 * 16, beside a sink of 1.
    weight = mx.sigmoid(mx.array(0.5 * 16 - 1.0))
    assert mx.allclose(out, weight)


def test_a_family_that_scores_positions_in_its_mask_is_refused_by_name(monkeypatch):
    llama = build("llama")
    attention = type(llama.layers[0].self_attn)
    forward = attention.__call__

    def scored(self, x, mask=None, cache=None):
        return forward(self, x, mx.zeros((1, 4, 1, 1)), cache)

    monkeypatch.setattr(attention, "__call__", scored)
    reason = r"'llama' does not run on the paged cache: mlx_lm\.models\.llama\.Attention\.__call__"
    with pytest.raises(NotImplementedError, match=reason):
        attention_layers(llama, "llama")
