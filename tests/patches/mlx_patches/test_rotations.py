# SPDX-License-Identifier: Apache-2.0
"""Rotations are recognized only by their result arrays."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from vllm_metal.patches.mlx_patches import rotations

POSITIONS = mx.array([0, 7, 3, 40], mx.int32)


def rows(heads=2, size=32):
    return mx.random.normal((4, heads, 1, size), key=mx.random.key(heads))


def test_keys_and_queries_are_known_as_they_were_before():
    rope = nn.RoPE(16, base=500.0, scale=0.5)
    queries, keys = rows(4), rows()
    with rotations.noted():
        turned = rope(queries, offset=POSITIONS), rope(keys, offset=POSITIONS)
        of = rotations.of_keys(POSITIONS, turned[1])
    assert of.keys.source is keys and of.queries.source is queries
    assert of.queries.result is turned[0]
    rotation = of.keys.rotation
    assert (rotation.kind.dims, rotation.base, rotation.scale) == (16, 500.0, 0.5)
    assert not rotation.kind.traditional and not rotation.kind.listed


def test_whoever_reads_rotated_rows_gets_mlxs():
    rope, keys = nn.RoPE(32), rows()
    wanted = np.array(rope(keys, offset=POSITIONS))
    with rotations.noted():
        np.testing.assert_array_equal(np.array(rope(keys, offset=POSITIONS)), wanted)


def other_dtype(queries, keys, rope):
    return rope(queries.astype(mx.float16), offset=POSITIONS), rope(keys, offset=POSITIONS)


def other_base(queries, keys, rope):
    return nn.RoPE(16, base=50.0)(queries, offset=POSITIONS), rope(keys, offset=POSITIONS)


def other_positions(queries, keys, rope):
    return rope(queries, offset=POSITIONS + 1), rope(keys, offset=POSITIONS)


def keys_first(queries, keys, rope):
    return (turned := rope(keys, offset=POSITIONS)) * 2, turned


@pytest.mark.parametrize("how", [other_dtype, other_base, other_positions, keys_first])
def test_queries_that_are_not_rotated_alike_are_left_alone(how):
    with rotations.noted():
        _, turned = how(rows(4), rows(), nn.RoPE(16))
        of = rotations.of_keys(POSITIONS, turned)
    assert of.queries is None


def changed(keys, rope):
    return rope(keys, offset=POSITIONS) * 1.0


def at_one_place(keys, rope):
    return rope(keys, offset=5)


def at_a_copy_of_the_positions(keys, rope):
    return rope(keys, offset=mx.array(POSITIONS))


def as_a_sequence(keys, rope):
    return rope(keys.swapaxes(0, 2), offset=POSITIONS[:1]).swapaxes(0, 2)


def by_a_base_of_the_device(keys, rope):
    options = {"traditional": False, "scale": 1.0, "freqs": mx.ones(8).astype(mx.float16)}
    return mx.fast.rope(keys, 16, base=None, offset=POSITIONS, **options)


def never(keys, rope):
    return keys


@pytest.mark.parametrize(
    "how",
    [
        changed,
        at_one_place,
        at_a_copy_of_the_positions,
        as_a_sequence,
        by_a_base_of_the_device,
        never,
    ],
)
def test_keys_of_which_that_is_not_known_are_written_as_they_are(how):
    with rotations.noted():
        given = how(rows(), nn.RoPE(16))
        assert rotations.of_keys(POSITIONS, given) is None


def test_what_nobody_asked_for_is_forgotten():
    rope = nn.RoPE(16)
    with rotations.noted():
        first = rope(rows(), offset=POSITIONS)
        for _ in range(4):
            rope(rows(), offset=POSITIONS)
        assert rotations.of_keys(POSITIONS, first) is None
        last = rope(rows(), offset=POSITIONS)
        assert rotations.of_keys(POSITIONS, last) is not None
        assert rotations.of_keys(POSITIONS, last) is None  # once
        kept = rope(rows(), offset=POSITIONS)
    with rotations.noted():
        assert rotations.of_keys(POSITIONS, kept) is None
    before = mx.fast.rope
    with pytest.raises(ZeroDivisionError), rotations.noted():
        raise ZeroDivisionError
    assert mx.fast.rope is before
