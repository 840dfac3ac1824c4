# SPDX-License-Identifier: Apache-2.0
"""Latent projections of many rows equal mlx-lm's, with one product per head."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear

from vllm_metal.cli.fit.graph import record
from vllm_metal.patches.mlx_patches import multi_linear

HEADS, INPUTS, OUTPUTS = 3, 64, 32
MODES = {
    "plain": None,
    "4 bit": (32, 4, "affine"),
    "8 bit": (64, 8, "affine"),
    "mxfp4": (32, 4, "mxfp4"),
}


@pytest.fixture(autouse=True)
def installed():
    multi_linear.install()


def projection(mode, dtype=mx.float32):
    mx.random.seed(11)
    layer = MultiLinear(INPUTS, OUTPUTS, HEADS)
    layer.set_dtype(dtype)
    return layer if MODES[mode] is None else layer.to_quantized(*MODES[mode])


def rows(count, dtype=mx.float32):
    """Makes rows like mlx-lm's modules: a part of each head's query."""
    every = mx.random.normal((count, 1, HEADS, INPUTS + 8), key=mx.random.key(2)).astype(dtype)
    return every.transpose(0, 2, 1, 3)[..., :INPUTS]


def formula(layer, x):
    """Returns [T, H, 1, out] float64, computed from the layer's weights."""
    weight = layer.weight
    if "scales" in layer:
        scales = layer.scales, layer.biases
        weight = mx.dequantize(weight, *scales, layer.group_size, layer.bits, mode=layer.mode)
    x, weight = (np.array(array.astype(mx.float32), np.float64) for array in (x, weight))
    return np.einsum("thqi,hoi->thqo", x, weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2, 37])
def test_rows_get_what_the_formula_says_and_mlx_lm_gives_each_alone(mode, count):
    layer, x = projection(mode), rows(count)
    found = layer(x)
    assert found.shape == (count, HEADS, 1, OUTPUTS)
    np.testing.assert_allclose(np.array(found), formula(layer, x), atol=1e-4)
    alone = mx.concatenate([layer(x[row : row + 1]) for row in range(count)])
    np.testing.assert_allclose(np.array(found), np.array(alone), atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_dtypes_stay(dtype):
    layer, x = projection("plain", dtype), rows(9, dtype)
    found = layer(x)
    assert found.dtype == dtype
    np.testing.assert_allclose(
        np.array(found.astype(mx.float32)), formula(layer, x), atol=2e-2, rtol=2e-2
    )


@pytest.mark.parametrize("mode", MODES)
def test_latents_become_keys_as_before(mode):
    """A sequence of mlx-lm's own, or latents that all heads read, are not a step's rows."""
    layer = projection(mode)
    for shape in ((1, HEADS, 5, INPUTS), (2, HEADS, 5, INPUTS), (4, 1, 1, INPUTS)):
        x = mx.random.normal(shape, key=mx.random.key(4))
        every = mx.broadcast_to(x, (shape[0], HEADS, *shape[2:]))
        np.testing.assert_allclose(np.array(layer(x)), formula(layer, every), atol=1e-4)
    back = mx.random.normal((2, 1, 5, OUTPUTS), key=mx.random.key(5))
    assert layer(back, transpose=False).shape == (2, HEADS, 5, INPUTS)


@pytest.mark.parametrize("mode", MODES)
def test_each_product_has_all_rows(mode):
    layer = projection(mode)
    graph = record(lambda x: [layer(x)], [rows(37)])
    (product,) = (each for each in graph.operations if each.kind.endswith("Matmul"))
    shape, _ = graph.arrays[product.inputs[0]]
    assert shape == (1, HEADS, 37, INPUTS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_matrices_of_some_heads(mode, dtype):
    layer = projection(mode, dtype)
    assert multi_linear.sizes(layer) == (INPUTS, OUTPUTS)
    unit = mx.eye(INPUTS)[:, None, None] * mx.ones((1, HEADS, 1, 1))
    found = multi_linear.matrices(layer, slice(1, 3), dtype)
    assert found.dtype == dtype
    wanted = formula(layer, unit)[:, 1:, 0].transpose(1, 2, 0)
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), wanted, atol=1e-6)


def test_projections_may_be_left_out_for_a_while():
    layer, x = projection("plain"), rows(5)
    sequence = mx.ones((1, HEADS, 5, INPUTS))
    with multi_linear.left_out():
        assert layer(x) is x
        assert layer(sequence).shape == (1, HEADS, 5, OUTPUTS)
        beside = layer(x[:, :, 0].swapaxes(0, 1)).swapaxes(0, 1)  # as a cache applies it
    np.testing.assert_allclose(np.array(beside), formula(layer, x)[:, :, 0], atol=1e-4)
    assert layer(x).shape == (5, HEADS, 1, OUTPUTS)
