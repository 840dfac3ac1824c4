# SPDX-License-Identifier: Apache-2.0
"""Counters of check mode, against manual counts. A line is 128 bytes: 32 floats."""

import mlx.core as mx
import pytest
from metal_interpreter import Checker

PLACE = """
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
"""


def dispatch(source, *inputs, threads=128, dtype=mx.float32, header="", schedule="forward"):
    checker = Checker(schedule)
    names = [f"in{k}" for k in range(len(inputs))]
    kernel = checker.metal_kernel("counted", names, ["out"], PLACE + source, header)
    kernel(
        inputs=list(inputs),
        grid=(threads, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(threads,)],
        output_dtypes=[dtype],
    )
    (made,) = checker.dispatches
    return made


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:3"])
def test_one_element_a_thread(schedule):
    made = dispatch("out[i] = in0[i];", mx.zeros((128,)), schedule=schedule)
    read, written = made.buffers["in0"], made.buffers["out"]
    assert (made.kernel, made.threadgroups) == ("counted", 2)
    assert (read.read_bytes, read.lines_read, read.unique_lines_read_by_threadgroup) == (512, 4, 4)
    assert (written.written_bytes, written.lines_written) == (512, 4)
    assert read.written_bytes == read.lines_written == 0
    assert written.read_bytes == written.lines_read == 0


def test_a_strided_read_touches_many_lines():
    made = dispatch("out[i] = in0[i * 32];", mx.zeros((128 * 32,)))
    read = made.buffers["in0"]
    assert (read.read_bytes, read.lines_read) == (512, 128)


def test_one_element_for_all():
    read = dispatch("out[i] = in0[0];", mx.zeros((128,))).buffers["in0"]
    assert (read.read_bytes, read.lines_read) == (512, 4)  # a line for each of four simdgroups
    assert read.unique_lines_read_by_threadgroup == 2


def test_lines_shared_by_simdgroups_count_once_for_the_threadgroup():
    source = "float x = 0; for (int k = 0; k < 10; ++k) x += in0[(l + 32 * k) % 320]; out[i] = x;"
    read = dispatch(source, mx.zeros((320,))).buffers["in0"]
    assert (read.read_bytes, read.lines_read) == (128 * 10 * 4, 4 * 10)
    assert read.unique_lines_read_by_threadgroup == 2 * 10


def test_a_line_read_again_by_the_next_turn_of_a_loop_counts_again():
    source = """
        float x = 0;
        _Pragma("clang loop unroll(disable)") for (uint k = 0; k < 10; ++k) x += in0[l ^ k];
        out[i] = x;
    """
    read = dispatch(source, mx.zeros((64,))).buffers["in0"]
    assert (read.lines_read, read.unique_lines_read_by_threadgroup) == (4 * 10, 2 * 2)


def test_instructions_are_told_apart_across_simdgroup_functions():
    source = "float x = 0; for (int k = 0; k < 10; ++k) x += simd_sum(in0[l]); out[i] = x;"
    read = dispatch(source, mx.zeros((64,))).buffers["in0"]
    # The compiler may load once: the value cannot change.
    assert read.lines_read in (4, 40)
    source = """
        float x = 0; for (int k = 0; k < 10; ++k) x = simd_sum(in0[(l + uint(x)) % 64]);
        out[i] = x;
    """
    read = dispatch(source, mx.zeros((64,))).buffers["in0"]
    assert (read.read_bytes, read.lines_read) == (128 * 10 * 4, 40)


def test_a_vector_is_one_load():
    sizes = {"float4": 16, "half4": 8, "bfloat4": 8, "uchar4": 4, "ulong2": 16, "ulong4": 32}
    source = "float x = 0;"
    for number, type in enumerate(sizes):
        source += f"{{ {type} v = ((const device {type}*)in{number})[i];"
        source += "x += float(v.x) + float(v[1]); }\n"
    given = [mx.zeros((128 * size,), dtype=mx.uint8) for size in sizes.values()]
    made = dispatch(source + "out[i] = x;", *given)
    for number, (type, size) in enumerate(sizes.items()):
        read = made.buffers[f"in{number}"]
        assert read.unique_lines_read_by_threadgroup == size, type
        if type != "ulong4":  # of which only the components used are loaded
            assert (read.read_bytes, read.lines_read) == (128 * size, size), type


def test_structures_count_whole():
    header = "struct Tile { int a, b, c, d, e, f, g, h; };"
    source = "Tile t = ((const device Tile*)in0)[i % 2]; out[i] = t.a + t.h; out[i] = t.c;"
    read = dispatch(source, mx.zeros((16,), dtype=mx.int32), header=header).buffers["in0"]
    assert read.unique_lines_read_by_threadgroup == 2


def test_metadata_has_counters_too():
    made = dispatch("out[i] = in0_shape[0] + in0[i];", mx.zeros((128,)))
    assert made.buffers["in0_shape"].read_bytes == 128 * 4


def test_work_that_is_not_traffic():
    source = """
        threadgroup float t[64]; threadgroup half u[8];
        t[l] = i; if (l < 8) u[l] = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = simd_sum(t[63 - l]) + float(u[l % 8]);
        threadgroup_barrier(mem_flags::mem_none);
        if (l < 16) x += simd_max(x);
        simdgroup_float8x8 a(1.0f), b; simdgroup_multiply(b, a, a);
        out[i] = x + b.thread_elements()[0];
    """
    made = dispatch(source)
    assert made.threadgroup_bytes == 64 * 4 + 8 * 2
    assert made.barriers_per_threadgroup == 2
    # In each of two threadgroups: 2 simd_sum, 1 simd_max with half of the lanes, 2 products.
    assert made.simd_collectives == 2 * 5
    assert made.partial_collectives == 2
    assert made.buffers["out"].written_bytes == 512
