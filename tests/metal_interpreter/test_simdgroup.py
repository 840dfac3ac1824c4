# SPDX-License-Identifier: Apache-2.0
"""Simdgroup functions, matrices and atomics against numpy."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import Checker, KernelViolation, metal_kernel

LANES = np.arange(32)


def lanes(*expressions, x=None, declare="", dtype=mx.float32, before="", compiler=metal_kernel):
    """Returns (expressions, 32), each lane's result; `x` is its element of x (0, 1, ...)."""
    x = mx.arange(32).astype(mx.float32) if x is None else x
    lines = [f"out[{k * 32} + lane] = {e};" for k, e in enumerate(expressions)]
    source = "uint lane = thread_index_in_simdgroup; auto x = in0[lane];\n" + declare
    (out,) = compiler("lanes", ["in0"], ["out"], source + "\n".join(lines))(
        inputs=[x],
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(len(expressions), 32)],
        output_dtypes=[dtype],
    )
    return np.array(out)


def test_reductions():
    x = np.random.default_rng(0).integers(1, 4, 32).astype(np.float32)
    got = lanes("simd_sum(x)", "simd_max(x)", "simd_min(x)", "simd_product(x)", x=mx.array(x))
    wanted = [x.sum(), x.max(), x.min(), x.prod()]
    np.testing.assert_array_equal(got, np.tile(np.array(wanted)[:, None], 32))


def test_reductions_of_bits():
    x = np.random.default_rng(0).integers(0, 2**32, 32, dtype=np.uint32)
    got = lanes("simd_and(x)", "simd_or(x)", "simd_xor(x)", x=mx.array(x), dtype=mx.uint32)
    wanted = [np.bitwise_and.reduce(x), np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x)]
    np.testing.assert_array_equal(got, np.tile(np.array(wanted)[:, None], 32))


def test_reductions_of_vectors_and_narrow_types():
    declare = "float4 v(x, 2 * x, 1, -x); half2 h(x, 1); bfloat b = bfloat(x);"
    got = lanes("dot(simd_sum(v), float4(1, 10, 100, 1000))", "simd_max(v).w", "simd_min(v).w",
                "float(simd_sum(h).x)", "float(simd_sum(b))", "simd_sum(long(x))",
                declare=declare)  # fmt: skip
    wanted = [496 + 9920 + 3200 - 496000, 0, -31, 496, 496, 496]
    np.testing.assert_array_equal(got, np.tile(np.array(wanted)[:, None], 32))


def test_prefix_sums():
    x = LANES.astype(np.float32) % 5 + 1
    names = [f"simd_prefix_{k}_sum(x)" for k in ("inclusive", "exclusive")]
    names += [f"simd_prefix_{k}_product(1 + x / 64)" for k in ("inclusive", "exclusive")]
    got = lanes(*names, x=mx.array(x))
    factors = np.cumprod(1 + x / 64)
    wanted = [np.cumsum(x), np.cumsum(x) - x, factors, np.r_[1, factors[:-1]]]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_shuffles():
    rotated = "simd_shuffle_rotate_{}(x, 3)"
    fill = "simd_shuffle_and_fill_{}(x, 100 + x, 3)"
    got = lanes(
        "simd_broadcast(x, 7)",
        "simd_broadcast_first(x + 2)",
        "simd_shuffle(x, (lane * 5 + 1) % 32)",
        "simd_shuffle_xor(x, 5)",
        rotated.format("up"),
        rotated.format("down"),
        fill.format("up"),
        fill.format("down"),
        "simd_shuffle_xor(float4(x, 2 * x, 3, 4), 16).y",
        "float(simd_shuffle(bfloat(x), 4))",
    )
    up, down = np.roll(LANES, 3), np.roll(LANES, -3)
    wanted = [
        np.full(32, 7),
        np.full(32, 2),
        (LANES * 5 + 1) % 32,
        LANES ^ 5,
        up,
        down,
        np.where(LANES < 3, 100 + up, up),
        np.where(LANES > 28, 100 + down, down),
        2 * (LANES ^ 16),
        np.full(32, 4),
    ]
    np.testing.assert_array_equal(got, wanted)


def test_shuffles_that_reach_past_the_end_keep_their_own_value():
    got = lanes("simd_shuffle_up(x, 3)", "simd_shuffle_down(x, 3)")
    wanted = [np.where(LANES < 3, LANES, LANES - 3), np.where(LANES > 28, LANES, LANES + 3)]
    np.testing.assert_array_equal(got, wanted)


def test_votes():
    got = lanes(
        "ulong(simd_ballot(x > 3 && x < 6))",
        "simd_any(x == 9)",
        "simd_any(x == 99)",
        "simd_all(x < 32)",
        "simd_all(x < 31)",
        "simd_is_first()",
        "ulong(simd_active_threads_mask())",
        dtype=mx.uint64,
    )
    wanted = np.array([0x30, 1, 0, 1, 0, 0, 0xFFFFFFFF], np.uint64)[:, None].repeat(32, 1)
    wanted[5, 0] = 1
    np.testing.assert_array_equal(got, wanted)


def test_quads():
    got = lanes(
        "quad_sum(x)",
        "quad_max(x)",
        "quad_min(x)",
        "quad_broadcast(x, 2)",
        "quad_shuffle_xor(x, 3)",
        "quad_shuffle_up(x, 1)",
        "quad_shuffle_down(x, 1)",
    )
    base, within = LANES // 4 * 4, LANES % 4
    wanted = [4 * base + 6, base + 3, base, base + 2, base + 3 - within]
    wanted += [base + np.maximum(within - 1, 0), base + np.minimum(within + 1, 3)]
    np.testing.assert_array_equal(got, wanted)


def test_lanes_that_returned_or_took_another_branch_do_not_take_part():
    declare = """
        if (lane >= 24) { out[lane] = -1; return; }
        float y = 0;
        if (lane < 10) y = simd_sum(x); else y = simd_max(x) + simd_broadcast_first(x);
        y += 1000 * simd_sum(1.0f);
        float z = simd_shuffle_down(y, 0), stranger = simd_shuffle(x, 30);
    """
    got = lanes("z", "isnan(stranger)", declare=declare)
    wanted = np.where(LANES < 10, 45, 23 + 10) + 24000
    np.testing.assert_array_equal(got[:, :24], [wanted[:24], np.ones(24)])


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:1", "random:2"])
def test_results_do_not_depend_on_the_schedule(schedule):
    declare = "for (int k = 0; k < 20; ++k) x = simd_shuffle_xor(x, 1 + k) + simd_sum(x) / 64;\n"
    got = lanes("x", declare=declare, compiler=Checker(schedule).metal_kernel)
    x = LANES.astype(np.float64)
    for k in range(20):
        x = x[LANES ^ (1 + k)] + x.sum() / 64
    np.testing.assert_allclose(got[0], x, rtol=1e-5)


# ---- matrices ----


def matrix(source, *inputs, template=None, shape=(8, 8)):
    names = [f"in{k}" for k in range(len(inputs))]
    (out,) = metal_kernel("matrix", names, ["out"], source)(
        inputs=[mx.array(x) if isinstance(x, np.ndarray) else x for x in inputs],
        template=template,
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.float32],
        init_value=0.0,
    )
    return np.array(out)


def test_where_lanes_keep_their_elements():
    """The layout of Apple's matrices, as MLX's own kernels compute it (steel/gemm/mma.h)."""
    source = """
        uint lane = thread_index_in_simdgroup;
        simdgroup_float8x8 m; simdgroup_load(m, in0, 8);
        out[lane * 2] = m.thread_elements()[0]; out[lane * 2 + 1] = m.thread_elements()[1];
    """
    got = matrix(source, np.arange(64, dtype=np.float32)).reshape(32, 2)
    quad = LANES // 4
    row = (quad & 4) + LANES // 2 % 4
    col = (quad & 2) * 2 + LANES % 2 * 2
    np.testing.assert_array_equal(got, np.stack([row * 8 + col, row * 8 + col + 1], 1))


def test_load_and_store_with_strides_origin_and_transposition():
    x = np.arange(20 * 24, dtype=np.float32).reshape(20, 24)
    source = """
        simdgroup_float8x8 m; simdgroup_load(m, in0, 24, ulong2(5, 7), in1[0] != 0);
        simdgroup_store(m, out, 16, ulong2(3, 2), in1[1] != 0); // thread_index_in_simdgroup
    """
    tile = x[7:15, 5:13]
    for load, store in itertools.product((False, True), repeat=2):
        got = matrix(source, x, np.array([load, store] + [0] * 6, np.int32), shape=(16, 16))
        wanted = np.zeros((16, 16))
        wanted[2:10, 3:11] = tile.T if load != store else tile
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(mx.float32, marks=pytest.mark.more), mx.float16, mx.bfloat16],
    ids=str,
)
def test_products(dtype):
    rng = np.random.default_rng(3)
    a, b, c = (mx.array(rng.normal(size=(8, 8)).astype(np.float32)) for _ in range(3))
    a, b = a.astype(dtype), b.astype(dtype)
    source = """
        simdgroup_matrix<T, 8, 8> a, b; simdgroup_matrix<float, 8, 8> c, d;
        simdgroup_load(a, in0, 8); simdgroup_load(b, in1, 8); simdgroup_load(c, in2, 8);
        simdgroup_multiply_accumulate(d, a, b, c);
        simdgroup_multiply(c, a, b);
        simdgroup_store(d, out, 8); simdgroup_store(c, out + 64, 8);
        // thread_index_in_simdgroup
    """
    got = matrix(source, a, b, c, template=[("T", dtype)], shape=(2, 8, 8))
    a64, b64, c64 = (np.array(x.astype(mx.float32), np.float64) for x in (a, b, c))
    np.testing.assert_allclose(got, [a64 @ b64 + c64, a64 @ b64], atol=2e-6)


def test_filled_and_diagonal_matrices():
    source = """
        simdgroup_matrix<float, 8, 8> f = make_filled_simdgroup_matrix<float, 8, 8>(3.0f), d(2.0f);
        simdgroup_store(f * d, out, 8); // thread_index_in_simdgroup
        simdgroup_store(d, out + 64, 8);
    """
    got = matrix(source, 0, shape=(2, 8, 8))
    np.testing.assert_array_equal(got, [np.full((8, 8), 6), 2 * np.eye(8)])


# ---- atomics ----


@pytest.mark.parametrize("compiler", [metal_kernel, Checker("random:5").metal_kernel])
def test_atomics(compiler):
    source = """
        threadgroup atomic_int counter;
        uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
        if (l == 0) atomic_store_explicit(&counter, 0, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&counter, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&out[0], i, memory_order_relaxed);
        atomic_fetch_max_explicit(&out[1], i, memory_order_relaxed);
        atomic_fetch_or_explicit(&out[2], 1u << (i % 32), memory_order_relaxed);
        uint seen = 0;
        while (!atomic_compare_exchange_weak_explicit(&out[3], &seen, seen + 2,
               memory_order_relaxed, memory_order_relaxed)) {}
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (l == 0)
            atomic_fetch_add_explicit(
                &out[4], uint(atomic_load_explicit(&counter, memory_order_relaxed)),
                memory_order_relaxed);
    """
    (out,) = compiler("atomics", [], ["out"], source, atomic_outputs=True)(
        inputs=[],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(8,)],
        output_dtypes=[mx.uint32],
        init_value=0,
    )
    assert out.tolist()[:5] == [127 * 64, 127, 2**32 - 1, 256, 128]


def test_atomics_of_floats():
    source = "atomic_fetch_add_explicit(&out[0], 0.5f, memory_order_relaxed); // grid_size"
    (out,) = metal_kernel("atomics", [], ["out"], source, atomic_outputs=True)(
        inputs=[],
        grid=(100, 1, 1),
        threadgroup=(10, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        init_value=1.0,
    )
    assert out.item() == 51


def test_simdgroup_barriers_that_never_meet():
    declare = """
        if (lane < 5) {
            simdgroup_barrier(mem_flags::mem_none);
            simdgroup_barrier(mem_flags::mem_none);
        } else simdgroup_barrier(mem_flags::mem_device);
    """
    with pytest.raises(KernelViolation, match=r"5 at simdgroup_barrier.*27 at simdgroup_barrier"):
        lanes("x", declare=declare)
