# SPDX-License-Identifier: Apache-2.0
"""Traced layers compute the same with fewer operations."""

import io
import re
from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from vllm_metal.patches.mlx_patches.traced_layers import TransposedWeights, angles_shared


def operations(*arrays):
    """Returns the counts of operations that compute the arrays."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, *arrays)
    return Counter(re.findall(r'label ?= ?"(\w+)"[^\n]*shape ?= ?rectangle', drawn.getvalue()))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [16, 10])
@pytest.mark.parametrize("with_freqs", [False, True])
def test_rotary_embeddings_equal_mlxs(dtype, traditional, dims, with_freqs):
    x = mx.random.normal((5, 3, 1, 16), key=mx.random.key(0)).astype(dtype)
    offset = mx.array([0, 7, 3, 4000, 12], mx.int32)
    options = {"traditional": traditional, "scale": 0.5, "offset": offset}
    options["base"] = None if with_freqs else 10000.0
    options["freqs"] = mx.arange(1, dims // 2 + 1, dtype=mx.float32) if with_freqs else None
    expected = mx.fast.rope(x, dims, **options)
    with angles_shared():
        found = mx.fast.rope(x, dims, **options)
    tolerance = 1e-6 if dtype == mx.float32 else 0
    assert found.dtype == dtype
    for array in (found, expected):
        assert array.shape == x.shape
    found, expected = (np.array(array.astype(mx.float32)) for array in (found, expected))
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_layers_have_their_angles_in_common_and_no_others():
    x, offset = mx.zeros((2, 1, 1, 8)), mx.array([3, 5], mx.int32)
    layers = [nn.RoPE(8), nn.RoPE(8), nn.RoPE(8, base=500.0)]
    other = mx.array([4, 6], mx.int32)
    with angles_shared():
        rotated = [layer(x, offset=offset) for layer in layers] + [layers[0](x, offset=other)]
    assert operations(*rotated)["Cos"] == 3
    assert operations(layers[0](x, offset=offset), layers[1](x, offset=offset))["Cos"] == 2


def test_a_sequence_is_rotated_by_mlx():
    x = mx.random.normal((1, 2, 6, 8), key=mx.random.key(1))
    expected = nn.RoPE(8)(x, offset=4)
    with angles_shared():
        found = nn.RoPE(8)(x, offset=4)
    np.testing.assert_array_equal(np.array(found), np.array(expected))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 6), nn.Linear(6, 4, bias=False)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_products_take_views_that_are_made_once():
    mx.random.seed(0)
    network, stranger = Network(), nn.Linear(8, 6)
    mx.eval(network.parameters(), stranger.parameters())
    x = mx.random.normal((3, 8), key=mx.random.key(2))
    expected = network(x)
    weights = TransposedWeights(network)
    weights.make()
    for _ in range(2):
        with weights.used():
            found = network(x)
            mx.eval(found, stranger(x))  # a layer of another network is not touched
        np.testing.assert_array_equal(np.array(found), np.array(expected))
    with weights.used():
        assert "Transpose" not in operations(network(x))
        assert operations(stranger(x))["Transpose"] == 1
    assert operations(network(x))["Transpose"] == 2


@pytest.mark.parametrize("context", [TransposedWeights(Network()).used, angles_shared])
def test_mlx_is_as_before_also_after_an_error(context):
    before = mx.fast.rope, nn.Linear.__call__
    with pytest.raises(ZeroDivisionError), context():
        raise ZeroDivisionError
    assert (mx.fast.rope, nn.Linear.__call__) == before
