# SPDX-License-Identifier: Apache-2.0
"""Attention over expanded keys and values equals that over latents, in float64."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.mla import MultiLinear

from metal_kernels.pace import MOST_WORK, Pace
from metal_kernels.paged_attention import buckets
from vllm_metal.cli.fit.graph import record
from vllm_metal.engine.attention import latent_heads
from vllm_metal.engine.attention.latent_heads import Projections
from vllm_metal.engine.kv_cache.latent_prompts import LatentHeads
from vllm_metal.patches.mlx_patches.seam import Scoring

HEADS = LatentHeads(num_heads=5, rank=64, rotated=8, key=32, value=24)
SCALE = 0.17
SINKS = np.array([1.5, -0.5, 0.2, 3.0, -2.0])  # of each head


def projections(quantized):
    mx.random.seed(3)
    layers = MultiLinear(HEADS.key, HEADS.rank, 5), MultiLinear(HEADS.rank, HEADS.value, 5)
    return Projections(*(each.to_quantized(32, 4) if quantized else each for each in layers))


def weights(layer):
    """Returns [H, out, in] float64."""
    if "scales" not in layer:
        return np.array(layer.weight, np.float64)
    packing = layer.group_size, layer.bits
    weight = mx.dequantize(layer.weight, layer.scales, layer.biases, *packing)
    return np.array(weight, np.float64)


def absorbed(queries, context, made, sinks=None):
    """Returns [Q, H, value] in the layer's own form, with queries in latent space."""
    embed, unembed = weights(made.embed), weights(made.unembed)
    rows, rotated = queries[..., : HEADS.key], queries[..., HEADS.key :]
    latents, keys = context[:, : HEADS.rank], context[:, HEADS.rank :]
    scores = np.einsum("qhk,hrk,sr->hqs", rows, embed, latents)
    scores = (scores + np.einsum("qhn,sn->hqs", rotated, keys)) * SCALE
    num_rows, length = scores.shape[1:]
    scores[:, np.triu(np.ones((num_rows, length), bool), length - num_rows + 1)] = -np.inf
    shares = np.exp(scores)
    total = shares.sum(axis=-1, keepdims=True)
    shares /= total if sinks is None else total + np.exp(sinks[:, None, None])
    return np.einsum("hqs,sr,hvr->qhv", shares, latents, unembed)


def drawn(num_rows, length):
    rng = np.random.default_rng(num_rows)
    queries = rng.normal(size=(num_rows, HEADS.num_heads, HEADS.key + HEADS.rotated))
    return queries, rng.normal(size=(length, HEADS.rank + HEADS.rotated))


def few_at_once(monkeypatch, length, heads):
    """Limits the size of calls to `heads` heads and 17 rows."""
    monkeypatch.setattr(buckets, "MIN_ROWS", 17)
    monkeypatch.setattr(buckets, "MAX_SCORES", 17 * length)
    numbers = 2 * length * (HEADS.key + HEADS.rotated + HEADS.value + 17)
    numbers += HEADS.rank * (HEADS.key + HEADS.value)
    monkeypatch.setattr(latent_heads, "MAX_EXPANDED_BYTES", 4 * numbers * heads)


PIECES = [(13, 13), (13, 26), (14, 40)]  # rows, and tokens that they see, of 40 tokens


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize(("num_rows", "length"), [(40, 40), (40, 97), (1, 30)])
@pytest.mark.parametrize(("turns", "sinks"), [(1, SINKS), (3, SINKS), (5, None)])
def test_turns_of_heads_and_pieces_of_rows_equal_the_absorbed_form(
    monkeypatch, quantized, num_rows, length, turns, sinks
):
    if turns > 1:
        few_at_once(monkeypatch, length, heads=2 if turns == 3 else 1)
    made, (queries, context) = projections(quantized), drawn(num_rows, length)
    given = (mx.array(each.astype(np.float32)) for each in (queries, context))
    of_heads = None if sinks is None else mx.array(sinks.astype(np.float32))
    found = latent_heads.attend(*given, made, Scoring(SCALE, of_heads))
    expected = absorbed(queries, context, made, sinks)
    np.testing.assert_allclose(np.array(found), expected, atol=2e-5)


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
def test_no_product_is_with_a_vector(quantized):
    made, shapes = projections(quantized), []
    given = [mx.array(each.astype(np.float32)) for each in drawn(40, 97)]
    graph = record(lambda *rows: [latent_heads.attend(*rows, made, Scoring(SCALE))], given)
    for operation in graph.operations:
        if operation.kind.endswith("Matmul"):
            shapes.append(graph.arrays[operation.inputs[0]][0])
    assert sorted(shape[-2] for shape in shapes) == [40, 40, 97, 97]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_dtypes_stay(dtype):
    made, (queries, context) = projections(False), drawn(20, 33)
    made.embed.set_dtype(dtype)
    made.unembed.set_dtype(dtype)
    found = latent_heads.attend(
        mx.array(queries, dtype), mx.array(context, dtype), made, Scoring(SCALE)
    )
    assert found.dtype == dtype
    wanted = absorbed(queries, context, projections(False))
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), wanted, atol=0.05)


LARGE = LatentHeads(num_heads=128, rank=512, rotated=64, key=128, value=128)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_rows", [256, 2048, 16384])
def test_what_is_built_and_done_at_once_is_bounded_for_any_context(monkeypatch, num_rows, fused):
    monkeypatch.setattr(latent_heads, "is_fused", lambda *_: fused)
    for context in (num_rows, 32768, 131072):
        turn = latent_heads.CallSize.of(LARGE, context, num_rows, mx.bfloat16)
        assert turn.fused == fused
        built = turn.num_heads * context * (192 + (192 if fused else 128)) * 2
        scores = 0 if fused else turn.num_heads * turn.num_rows * context * 4
        assert built + scores <= latent_heads.MAX_EXPANDED_BYTES
        assert 2 * turn.num_heads * turn.num_rows * context * (192 + 128) <= MOST_WORK
    assert latent_heads.CallSize.of(LARGE, 256, 256, mx.bfloat16).num_heads == 128


def test_the_largest_call_is_one_turn():
    large = HEADS._replace(num_heads=4096)
    turn = latent_heads.CallSize.of(large, 3000, 512, mx.float32)
    assert turn.num_heads < 4096
    graph = record(lambda: [latent_heads.largest_call(large, 3000, 512, mx.float32)], [])
    shapes = [shape for shape, _ in graph.arrays.values()]
    assert (1, turn.num_heads, 3000, HEADS.key + HEADS.rotated) in shapes
    assert max(shape[1] for shape in shapes if len(shape) == 4) == turn.num_heads


def test_command_buffers_may_end_between_all_turns_and_pieces(monkeypatch):
    asked = []

    class Asked(Pace):
        def before(self, work, *done):
            asked.append((work, len(done)))
            super().before(work, *done)

    few_at_once(monkeypatch, length=40, heads=2)
    made, (queries, context) = projections(False), drawn(40, 40)
    given = (mx.array(each.astype(np.float32)) for each in (queries, context))
    found = latent_heads.attend(*given, made, Scoring(SCALE), Asked(most_work=1))
    np.testing.assert_allclose(np.array(found), absorbed(queries, context, made), atol=2e-5)
    two, one = (
        [HEADS._replace(num_heads=heads).work(rows, seen) for rows, seen in PIECES]
        for heads in (2, 1)
    )
    assert [work for work, _ in asked] == [*two, *two, *one]
    assert [count for _, count in asked] == [0, *[1] * 8]


def test_the_sizes_are_those_of_the_matrices():
    for quantized in (False, True):
        assert projections(quantized).heads(rotated=8) == HEADS
