# SPDX-License-Identifier: Apache-2.0
"""Kernels with one planted fault each, and correct ones, under several schedules."""

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import Checker, KernelViolation

from tests.metal_kernels.elf import reads_elf

SCHEDULES = ["forward", "reverse", "random:1", "random:2"]
PLACE = """
    uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
    uint g = threadgroup_position_in_grid.x, lane = thread_index_in_simdgroup;
"""


def check(source, *inputs, schedule="forward", threads=128, shape=(128,), **call):
    """Runs `source` in threadgroups of 64; returns the checker and the output."""
    checker = Checker(schedule)
    names = [f"in{k}" for k in range(len(inputs))]
    kernel = checker.metal_kernel("planted", names, ["out"], PLACE + source)
    (out,) = kernel(
        inputs=list(inputs),
        grid=(threads, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[shape],
        output_dtypes=[mx.float32],
        **call,
    )
    return checker, np.array(out)


def violation(source, *inputs, **call):
    with pytest.raises(KernelViolation) as caught:
        check(source, *inputs, **call)
    return caught.value


def numbers(count=128):
    return mx.arange(count).astype(mx.float32)


# Which barrier stands at {barrier} is chosen by the second buffer: one kernel to compile for all.
BARRIERS = {
    "none": "",
    "threadgroup": "threadgroup_barrier(mem_flags::mem_threadgroup);",
    "threadgroup, of device memory": "threadgroup_barrier(mem_flags::mem_device);",
    "threadgroup, of no memory": "threadgroup_barrier(mem_flags::mem_none);",
    "simdgroup": "simdgroup_barrier(mem_flags::mem_threadgroup);",
    "simdgroup, of device memory": "simdgroup_barrier(mem_flags::mem_device);",
    "a sum": "simd_sum(1.0f);",
}
CHOICE = "".join(
    f"if (in1[0] == {number}) {{ {barrier} }} else "
    for number, barrier in enumerate(BARRIERS.values())
)
PROGRAMS = {
    "barrier": "threadgroup float t[64]; t[l] = in0[i]; {barrier} out[i] = t[63 - l];",
    "two phases": """threadgroup float t[64]; t[l] = in0[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float x = t[63 - l]; {barrier} t[l] = x;
        threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = t[l];""",
    "device": """device float* p = (device float*)in0; p[i] = i;
        {barrier} out[i] = p[g * 64 + 63 - l];""",
    "simdgroup": "threadgroup float t[64]; t[l] = in0[i]; {barrier} out[i] = t[l ^ 31];",
}
NEEDED = {
    "barrier": "threadgroup",
    "two phases": "threadgroup",
    "device": "threadgroup, of device memory",
    "simdgroup": "simdgroup",
}


def check_with(program, barrier, schedule):
    source = PROGRAMS[program].replace("{barrier}", CHOICE + "{}")
    chosen = mx.full((8,), list(BARRIERS).index(barrier))
    return check(source, numbers(), chosen, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_barrier_that_is_needed(name, schedule):
    _, out = check_with(name, NEEDED[name], schedule)
    mirrored = np.arange(128).reshape(2, 64)[:, ::-1].ravel()
    np.testing.assert_array_equal(out, np.arange(128) ^ 31 if name == "simdgroup" else mirrored)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        *((name, "none") for name in PROGRAMS),
        ("two phases", "threadgroup, of device memory"),
        ("two phases", "threadgroup, of no memory"),
        ("two phases", "simdgroup"),
        ("two phases", "a sum"),
        ("device", "threadgroup"),
        ("device", "simdgroup, of device memory"),
        ("barrier", "simdgroup"),
    ],
)
def test_no_barrier_or_one_that_does_not_order_this(name, barrier, schedule):
    with pytest.raises(KernelViolation) as caught:
        check_with(name, barrier, schedule)
    # Which of the two it is depends on who comes first; that it is found does not.
    assert caught.value.kind in ("race", "uninitialized")
    assert caught.value.kernel == "planted"


RACE = 'if (i == 3)\n#line 10 "here.metal"\nout[0] = 1;\nelse if (i == 70)\nout[0] = 2;'


def test_a_race_names_both_threads():
    found = violation(RACE)
    assert found.kind == "race"
    assert "'out' element 0 is written by thread 6 of threadgroup (1, 0, 0)" in str(found)
    assert "was written by thread 3 of another threadgroup" in str(found)


@reads_elf
def test_a_race_names_both_lines():
    message = str(violation(RACE))
    assert "by thread 6 of threadgroup (1, 0, 0) here.metal:12" in message
    assert "was written by thread 3 of another threadgroup here.metal:10" in message


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_threadgroups_are_never_ordered(schedule):
    reads = "device float* p = (device float*)in0; if (g == 0) p[l] = 1; out[i] = p[l + 64];"
    check(reads, numbers(), schedule=schedule)
    found = violation(reads.replace("l + 64", "l"), numbers(), schedule=schedule)
    assert found.kind == "race"
    barrier = "threadgroup_barrier(mem_flags::mem_device); out"
    assert violation(reads.replace("l + 64", "l").replace("out", barrier), numbers()).kind == "race"


def test_many_threads_may_read_what_nobody_writes():
    check("out[i] = in0[0] + in0[l];", numbers())


@pytest.mark.parametrize(
    ("index", "element"),
    [((1, 1), 128), ((1, -1), -1), ((1, 70), 128), ((1000000000, 0), 1000000000)],
)
def test_outside_of_a_buffer(index, element):
    """Also far outside, and never mistaken for another buffer."""
    factor = mx.array([*index, *[0] * 6], mx.int64)
    source = "out[i] = in1[long(i) * in3[0] + in3[1]] + in0[i];"
    found = violation(source, numbers(), numbers(), numbers(), factor)
    assert found.kind == "out_of_bounds"
    assert f"element {element} of 'in1', which has 128" in str(found)


def test_writing_outside_of_an_output():
    found = violation("out[i + 64] = 0;")
    assert found.kind == "out_of_bounds"
    assert "write of 4 bytes at element 128 of 'out'" in str(found)


def test_a_vector_that_sticks_out():
    x = numbers(126)
    check("out[i] = ((const device float2*)in0)[min(i, 62u)].y;", x)
    found = violation("out[i] = ((const device float4*)in0)[min(i, 31u)].w;", x)
    assert found.kind == "out_of_bounds"


def test_an_empty_buffer_has_no_elements():
    assert violation("out[i] = in0[0];", mx.zeros((0,))).kind == "out_of_bounds"


def test_a_wild_pointer():
    found = violation("out[i] = *(const device float*)(ulong(i) + 4096);", numbers())
    assert found.kind == "out_of_bounds"
    assert "no buffer" in str(found)


@pytest.mark.parametrize("by", [1, 64, 4000])
def test_outside_of_a_threadgroup_variable(by):
    source = "threadgroup float t[64], u[64]; u[l] = 0; t[l + uint(in0[0])] = 0; out[i] = 0;"
    found = violation(source, mx.full((8,), by))
    assert found.kind == "out_of_bounds"
    assert "threadgroup variable 't', which has 64" in str(found)


def test_reading_what_nobody_wrote():
    source = "threadgroup half t[64]; if (l != 7) t[l] = 0; {} out[i] = t[l];"
    found = violation(source.format("threadgroup_barrier(mem_flags::mem_threadgroup);"))
    assert found.kind == "uninitialized"
    assert "element 7 of threadgroup variable 't'" in str(found)


def test_reading_an_output():
    found = violation("out[i] += 1;")
    assert found.kind == "uninitialized"
    _, out = check("out[i] += 1;", init_value=2.0)
    assert np.all(out == 3)


def test_divergence():
    source = "if (l < 40) threadgroup_barrier(mem_flags::mem_none); out[i] = 0;"
    found = violation(source)
    assert found.kind == "divergence"
    assert "24 returned from the kernel" in str(found)
    assert "40 at threadgroup_barrier" in str(found)


def test_too_much_threadgroup_memory():
    assert (
        violation("threadgroup float t[8193]; t[l] = 0; out[i] = 0;").kind == "threadgroup_memory"
    )


def test_writes_through_an_input_reach_the_array():
    pool = mx.zeros((4, 64), dtype=mx.bfloat16)
    check("((device bfloat16_t*)in0)[64 + i] = bfloat16_t(float(i));", pool)
    wanted = np.zeros((4, 64))
    wanted[1:3] = np.arange(128).reshape(2, 64)
    np.testing.assert_array_equal(np.array(pool.astype(mx.float32)), wanted)


def test_nothing_is_written_by_a_kernel_that_was_given_up():
    pool = mx.zeros((128,))
    violation("((device float*)in0)[i] = 1; out[i] = in0[i + 1];", pool)
    assert not mx.any(pool).item()


def test_one_array_bound_twice_is_one_memory():
    x = numbers()
    found = violation("((device float*)in0)[i] = 1; out[i] = in1[i ^ 1];", x, x)
    assert found.kind == "race"


def test_views_that_overlap_are_one_memory():
    x = numbers(192)
    low, high = x[:128], x[64:]
    write = "((device float*)in0)[i] = 1; out[i] = in1[{}];"
    check(write.format("i / 2 + 64"), low, high)
    assert violation(write.format("i / 2"), low, high).kind == "race"


def test_private_arrays_are_private():
    source = """
        float mine[32]; thread float* p = mine;
        for (int k = 0; k < 32; ++k) p[(k * 7 + i) % 32] = in0[i] + k;
        float sum = 0; for (int k = 0; k < 32; ++k) sum += p[(k + l) % 32];
        out[i] = sum;
    """
    _, out = check(source, numbers())
    np.testing.assert_array_equal(out, np.arange(128) * 32 + 496)


def test_tables_of_constants_may_be_read():
    kernel = Checker().metal_kernel(
        "table",
        ["x"],
        ["out"],
        PLACE + "out[i] = table[uint(x[i]) % 4];",
        header="constant float table[4] = {3, 1, 4, 1};",
    )
    (out,) = kernel(
        inputs=[numbers()],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(128,)],
        output_dtypes=[mx.float32],
    )
    assert out.tolist() == [3, 1, 4, 1] * 32


@pytest.mark.slow
def test_a_pool_of_more_than_four_gigabytes():
    pool = mx.zeros((5, 1 << 29), dtype=mx.bfloat16)
    source = """
        ulong at = ulong(i) * 20971520 + 5;
        ((device bfloat16_t*)in0)[at] = bfloat16_t(1.0f);
        out[i] = in0[at + 1];
    """
    checker, _ = check(source, pool)
    assert checker.dispatches[-1].buffers["in0"].written_bytes == 256
    written = mx.array([127 * 20971520 + 5])
    assert mx.take(pool[4], written - (4 << 29)).item() == 1
    assert violation(source.replace("at + 1", "at + 26214400"), pool).kind == "out_of_bounds"


def test_schedules():
    with pytest.raises(ValueError, match="schedule is 'forward', 'reverse' or 'random:SEED'"):
        Checker("sideways")


def test_the_schedule_is_the_order_threads_run_in():
    orders = {}
    for schedule in ("forward", "reverse", "random:1", "random:1 again", "random:2"):
        _, out = check(
            "device atomic_uint* n = (device atomic_uint*)in0;"
            "out[i] = atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);",
            mx.zeros((8,), dtype=mx.uint32),
            schedule=schedule.split()[0],
        )
        orders[schedule] = out.tolist()
    assert orders["forward"] == list(range(128))
    assert orders["reverse"] == list(reversed(range(128)))
    assert orders["random:1"] == orders["random:1 again"]
    assert len({tuple(o) for o in orders.values()}) == 4
    assert sorted(orders["random:2"]) == list(range(128))
