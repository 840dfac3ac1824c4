# SPDX-License-Identifier: Apache-2.0
"""Rotations in writes, against a float64 formula and MLX's own rotation."""

import itertools
from unittest import mock

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import rope_utils

from metal_kernels import kernel, kv_write
from metal_kernels.kv_write import Rotation, RotationKind, reference
from tests.metal_kernels.kv_write.rotating import Rotating, rotated

F16, BF16, F32, FP8, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.uint8, mx.int8
EPS = {F16: 2.0**-10, BF16: 2.0**-7, F32: 2.0**-23}
SCHEDULES = ["forward", "reverse", "random:1"]

# Sizes of keys and of values, dtypes of rows and pools, the rotation. Each is a kernel to compile.
KINDS = {
    "whole": ((64, 64), F32, F32, RotationKind(64)),
    "neighbors": ((128, 128), F16, F16, RotationKind(128, traditional=True)),
    "a part": ((256, 256), BF16, BF16, RotationKind(64)),
    "neighbors of a part": ((80, 80), F32, F16, RotationKind(32, traditional=True)),
    "listed": ((128, 128), BF16, BF16, RotationKind(128, listed=True)),
    "listed, a part, neighbors": ((96, 64), F16, F16, RotationKind(48, 0, True, True)),
    "latents": ((576,), F16, F16, RotationKind(64, first=512, traditional=True)),
    "latents, listed": ((576,), BF16, BF16, RotationKind(64, 512, True, True)),
    "fp8": ((64, 64), BF16, FP8, RotationKind(64)),
    "int8": ((128, 128), F16, INT8, RotationKind(128, listed=True)),
}


def orders():
    """Pairs every kind with every thread order; one order each outside of nightly runs."""
    by_day = {"whole": "forward", "neighbors": "reverse", "latents, listed": "random:1"}
    for place, name in enumerate(KINDS):
        for schedule in SCHEDULES:
            marks = () if by_day.get(name) == schedule else pytest.mark.slow
            if name not in by_day and schedule == SCHEDULES[place % 3]:
                marks = pytest.mark.more
            yield pytest.param(name, schedule, marks=marks, id=f"{name}, {schedule}")


@pytest.mark.parametrize(("name", "schedule"), list(orders()))
def test_rows_turn_as_the_formula_says(name, schedule):
    """In every order of threads, without an access out of bounds or a race."""
    case = Rotating(*KINDS[name], slots=[5, -1, 40, 0, 17, 3])
    checker = metal_interpreter.Checker(schedule=schedule)
    with kernel.using(checker.metal_kernel):
        queries = case.write()
    for found, given in ((queries, case.queries), (case.held_keys(), case.keys)):
        if found is None:
            continue
        wanted = rotated(given, case.positions, case.rotation)
        limits = np.abs(wanted) * EPS[case.dtype] + np.abs(wanted).max() * 2.0**-20
        of_pool = found is not queries
        written = [row for row, slot in enumerate(case.slots) if slot >= 0] if of_pool else ...
        if of_pool and case.pool_dtype in (FP8, INT8):
            limits = limits + case.steps()
        elif of_pool:
            limits = limits + np.abs(wanted) * EPS[case.pool_dtype]
        wanted, limits = wanted[written], limits[written]
        assert (np.abs(np.array(found.astype(F32)) - wanted) <= limits).all()
    case.check_values()


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("whole", "neighbors") else pytest.param(name, marks=pytest.mark.slow)
        for name, kind in KINDS.items()
        if kind[2] == kind[1]
    ],
)
def test_what_is_kept_is_what_mlx_rotates_then_writes(name):
    """Within a rounding: MLX's CPU sine may differ in its last bit."""
    case = Rotating(*KINDS[name], slots=[7, 2, 33])
    with kernel.using(metal_interpreter.metal_kernel):
        case.write()
    turned = reference.rotate(case.keys, case.positions, case.rotation)
    wanted = np.array(turned.astype(F32))
    found = np.array(case.held_keys().astype(F32))
    np.testing.assert_allclose(found, wanted, rtol=EPS[case.dtype], atol=2.0**-12)
    # Most are the same to the bit: what is rounded to 16 bits hides the sines' last ones.
    assert case.dtype == F32 or (found == wanted).mean() > 0.99


@pytest.mark.parametrize(
    "pool_dtype", [F16, FP8, pytest.param(INT8, marks=pytest.mark.more)], ids=str
)
def test_position_zero_and_no_rotation_are_written_alike(pool_dtype):
    """To the bit: unrotated rows pass through unchanged."""
    case = Rotating((64, 64), F16, pool_dtype, RotationKind(64), slots=[1, 9, 30])
    other = Rotating((64, 64), F16, pool_dtype, RotationKind(64), slots=[1, 9, 30])
    case.positions = mx.zeros(3, mx.int32)
    with kernel.using(metal_interpreter.metal_kernel):
        queries = case.write()
        mx.eval(kv_write.write(**other.rows(), **other.pools()))
    assert mx.array_equal(queries, case.queries)
    for one, another in zip(case.pools().values(), other.pools().values(), strict=True):
        assert (one is None) == (another is None)
        assert one is None or mx.array_equal(one.view(mx.uint8), another.view(mx.uint8))


def test_every_frequency_of_mlx_lms_ropes():
    """Uses the arrays that mlx-lm passes to `mx.fast.rope`."""
    long = {"original_max_position_embeddings": 64, "short_factor": [1.0] * 16}
    scalings = [
        None,
        {"type": "linear", "factor": 4.0},
        {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"type": "longrope", "long_factor": [1.0 + i / 8 for i in range(16)], **long},
        {"type": "proportional", "partial_rotary_factor": 0.5},
    ]
    rng = np.random.default_rng(0)
    for scaling, traditional in itertools.product(scalings, (False, True)):
        if traditional and scaling and scaling["type"] == "longrope":
            continue  # mlx-lm has none
        rope = rope_utils.initialize_rope(32, 1e4, traditional, scaling, 4096)
        original = mx.fast.rope
        rows = mx.array(rng.normal(size=(5, 2, 1, 64)).astype(np.float32))
        positions = mx.array([0, 3, 100, 999, 4000])
        with mock.patch.object(mx.fast, "rope") as called:
            rope(rows, offset=positions)
        (given, dims), options = called.call_args
        rotation = Rotation.of(
            *(dims, options["traditional"], options["base"], options["scale"]),
            *(options.get("freqs"), F32),
        )
        wanted = original(given, dims, **options)[:, :, 0]
        pool = mx.zeros((2, 1, 16, 64))
        with kernel.using(metal_interpreter.metal_kernel):
            turned, _ = kv_write.rotate_and_write(
                given[:, :, 0], given[:, :, 0], mx.arange(5), pool, mx.zeros_like(pool),
                queries=given[:, :, 0], positions=positions, rotation=rotation,
            )  # fmt: skip
        # An angle of 4000 is 2^-11 from its neighbors in float32.
        np.testing.assert_allclose(turned, wanted, atol=5e-3)
        np.testing.assert_allclose(turned[:3], wanted[:3], atol=1e-4)
        assert mx.array_equal(pool[:, 0, :5], turned.swapaxes(0, 1))


def test_each_byte_of_keys_and_values_is_written_once():
    checker = metal_interpreter.Checker(schedule="reverse")
    case = Rotating(*KINDS["whole"], slots=[5, -1, 40])
    with kernel.using(checker.metal_kernel):
        case.write()
    (dispatch,) = checker.dispatches
    size = 2 * case.keys.shape[1] * 64 * 4
    for name in ("key_pool", "value_pool"):
        assert dispatch.buffers[name].written_bytes == size
    assert dispatch.buffers["rotated"].written_bytes == case.queries.nbytes
    assert dispatch.buffers["values"].read_bytes == size


def test_what_the_kernel_does_not_take_is_no_rotation():
    listed = mx.ones(16)
    assert Rotation.of(32, False, None, 1.0, listed, F16) is not None
    assert Rotation.of(32, False, None, 1.0, listed.astype(F16), F16) is None
    assert Rotation.of(14, False, None, 1.0, mx.ones(7), F16) is None  # would be constants
    assert Rotation.of(32, False, None, 1.0, mx.ones(17), F16) is None
    assert Rotation.of(31, False, 1e4, 1.0, None, F16) is None
    assert Rotation.of(32, False, mx.array(1e4), 1.0, None, F16) is None
    assert Rotation.of(32, False, 1e4, 1.0, None, mx.int32) is None


def changed(named, **other):
    return pytest.param(other, named, id=f"{named} {len(str(other))}")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        changed("positions", positions=mx.zeros(1, mx.int32)),
        changed("positions", positions=mx.zeros(3)),
        changed("queries", queries=mx.zeros((3, 2, 32), F16)),
        changed("queries", queries=mx.zeros((3, 2, 64), F32)),
        changed("rotation", rotation=Rotation(RotationKind(66), base=1e4)),
        changed("rotation", rotation=Rotation(RotationKind(0), base=1e4)),
        changed("rotation", rotation=Rotation(RotationKind(64))),
        changed("rotation", rotation=Rotation(RotationKind(64, listed=True), base=1e4)),
        changed("rotation", rotation=Rotation(RotationKind(64, listed=True), 1, None, mx.ones(8))),
        changed("tails", rotation=Rotation(RotationKind(32, 32), base=1e4)),
        changed("tails", tails=mx.zeros((3, 2, 32), F16)),
    ],
)
def test_refuses_what_does_not_fit_by_name(other, named):
    case = Rotating((64, 64), F16, F16, RotationKind(64), slots=[0, 1, 2])
    with pytest.raises(ValueError, match=named):
        kv_write.rotate_and_write(**case.arguments() | other)


def test_no_rows_and_rows_without_queries():
    case = Rotating((64, 64), F16, F16, RotationKind(64), slots=[])
    queries, fence = kv_write.rotate_and_write(**case.arguments())
    assert queries.shape == (0, 4, 64) and fence.shape == (8,)
    case = Rotating((64, 64), F16, F16, RotationKind(64), slots=[4, 2])
    with kernel.using(metal_interpreter.metal_kernel):
        queries, _ = kv_write.rotate_and_write(**case.arguments() | {"queries": None})
    assert queries is None
    wanted = rotated(case.keys, case.positions, case.rotation)
    np.testing.assert_allclose(np.array(case.held_keys()), wanted, atol=2e-3)
