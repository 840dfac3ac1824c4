# SPDX-License-Identifier: Apache-2.0
"""The proxy's results for small kernels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import CompileError, proxy


def call(source, header="", template=(), dtype=mx.float32, threads=(256, 1, 1)):
    recorder = proxy.Recorder()
    kernel = recorder.metal_kernel("probe", ["a", "b", "count"], ["out"], source, header)
    (out,) = kernel(
        inputs=[mx.zeros(64, dtype), mx.zeros(64, mx.int32), 5],
        template=template,
        grid=(1024, 1, 1),
        threadgroup=threads,
        output_shapes=[(8,)],
        output_dtypes=[mx.float32],
    )
    assert np.array(out).tolist() == [0.0] * 8
    return recorder.calls[0]


def figures(*arguments, **named):
    return proxy.measure(call(*arguments, **named))


def loads(found):
    return [batch.count for batch in found.batches]


LOOP = """
    const uint i = thread_position_in_grid.x;
    float sum = 0.0f;
    for (int n = 0; n < count; n++) {{
        {body}
    }}
    out[i] = sum;
"""


def looped(body, **named):
    return figures(LOOP.format(body=body), **named)


def test_loads_that_do_not_depend_on_each_other_are_under_way_together():
    found = looped("for (int k = 0; k < 4; k++) sum += a[(n * 4 + k) * 1000 + i];")
    assert loads(found) == [4]
    assert found.in_flight == found.loaded == 4 * 4 * 256


def test_a_load_by_what_a_load_found_waits_for_it():
    found = looped("sum += a[b[i + n * 1000] * 1000 + i];")
    assert loads(found) == [1, 1]
    assert (found.in_flight, found.loaded) == (4 * 256, 8 * 256)


def test_a_load_behind_a_branch_waits_by_itself():
    together = "for (int k = 0; k < 4; k++) sum += exp2(a[(n * 4 + k) * 1000 + i]);"
    assert loads(looped(together)) == [4]
    apart = together.replace("sum +=", "if (n * k < int(i)) sum +=")
    assert loads(looped(apart)) == [1] * 4


def test_what_the_end_of_a_round_loads_the_next_one_waits_for():
    source = """
        const uint i = thread_position_in_grid.x;
        float next = a[i], sum = 0.0f;
        for (int n = 1; n < count; n++) {
            sum = exp2(sum + next);
            next = a[n * 1000 + i];
        }
        out[i] = sum + next;
    """
    assert loads(figures(source)) == [1]


NESTED = """
    for (int lap = 0; lap < b[0]; lap++) {{
        float part = exp2(sum);
        for (int k = 0; k < b[1]; k++) {{
            {inner}
        }}
        {after}
        sum = exp2(part + sum);
    }}
"""


def nested(inner, after=""):
    """Returns a main loop with exponentials and products around an inner loop."""
    source = LOOP.format(body=NESTED.format(inner=inner, after=after)).replace(
        "float sum", "auto product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f); float sum"
    )
    kinds = figures(source.replace("= sum;", "= sum + product.thread_elements()[1];")).kinds
    return kinds["exponential"], kinds["multiply"]


MULTIPLY = """
    simdgroup_matrix<half, 8, 8> left;
    left.thread_elements()[0] = half(part);
    simdgroup_multiply_accumulate(product, left, left, product);
"""


def test_laps_around_the_loop_that_loads_are_no_part_of_its_round():
    assert nested(f"part += a[(lap * 99 + k) * 1000 + i]; {MULTIPLY}") == (0, 1)


def test_a_loop_that_loads_for_a_product_outside_of_it_is_a_part_of_the_round():
    exponentials, products = nested("part += a[(lap * 99 + k) * 1000 + i];", MULTIPLY)
    assert exponentials >= 2 and products == 1


def test_a_round_goes_to_the_last_place_that_the_loop_goes_on_from():
    body = """
        sum += a[n * 1000 + i];
        if (sum > 8.0f) continue;
        sum = exp2(sum);
        out[n * 1000 + i] = sum;
    """
    assert looped(body).kinds["exponential"] == 1


@pytest.mark.parametrize(
    "dtype", [pytest.param(mx.float32, marks=pytest.mark.more), mx.float16, mx.uint8], ids=str
)
def test_bytes_of_loads(dtype):
    source = """
        const vec<T, 4> four = *(const device vec<T, 4>*)(a + i * 4 + n * 1000);
        sum += float(four[0]) + float(four[1]) + float(four[2]) + float(four[3]);
    """
    found = looped(source, template=[("T", dtype)], dtype=dtype)
    assert [batch.bytes for batch in found.batches] == [4 * dtype.size]


@pytest.mark.parametrize("count", [16, 64])
def test_what_lives_through_the_loop_takes_registers(count):
    header = '#define UNROLLED _Pragma("clang loop unroll(full)")\n'
    source = """
        const uint i = thread_position_in_grid.x;
        float kept[N];
        UNROLLED for (int k = 0; k < N; k++) kept[k] = a[k * 1000 + i];
        for (int n = 0; n < count; n++) {
            const float value = a[n * 1000 + i];
            UNROLLED for (int k = 0; k < N; k++) kept[k] = kept[k] * value + float(k);
        }
        UNROLLED for (int k = 0; k < N; k++) out[k * 1000 + i] = kept[k];
    """
    found = figures(source, header, [("N", count)])
    assert count <= found.loop_registers <= count + 16
    assert found.loop_registers <= found.registers
    assert found.scratch == 0


def test_a_large_array_by_an_index_lies_in_scratch_memory():
    source = """
        float kept[512];
        for (int k = 0; k < 512; k++) kept[(k * b[0]) & 511] = a[k];
        out[thread_position_in_grid.x] = kept[b[1] & 511];
    """
    assert 2048 <= figures(source).scratch < 2100


def test_instructions_of_metal_count_once_each():
    body = """
        const float x = a[n * 1000 + i];
        sum += simd_sum(x) + simd_max(x) + metal::precise::tanh(x);
        sum += metal::exp2(x) + metal::fast::exp2(x + 1.0f);
        sum += simd_shuffle(x, ushort(b[0])) + simd_shuffle_xor(x, 1) + simd_shuffle_xor(x, 8);
        simdgroup_matrix<half, 8, 8> left;
        left.thread_elements()[0] = half(x);
        left.thread_elements()[1] = half(x);
        simdgroup_multiply_accumulate(product, left, left, product);
    """
    source = LOOP.format(body=body).replace(
        "float sum", "auto product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f); float sum"
    )
    source = source.replace("= sum;", "= sum + product.thread_elements()[1];")
    kinds = figures(source).kinds
    of_metal = {kind: kinds[kind] for kind in ("sum", "exponential", "shuffle", "multiply")}
    assert of_metal == {"sum": 2, "exponential": 2, "shuffle": 3, "multiply": 1}


def test_slots_with_either_cost_of_a_sum():
    found = looped("sum += simd_sum(a[n * 1000 + i]);")
    plain = found.kinds["plain"] + 2 * found.kinds["pair"]
    assert found.slots(proxy.FAST_SUM) == plain + 4
    assert found.slots(proxy.SLOW_SUM) == plain + 10.5


def test_positions_threadgroup_memory_and_vectors():
    source = """
        threadgroup float tile[N], more[2][4];
        const uint lane = thread_index_in_simdgroup;
        tile[lane] = a[threadgroup_position_in_grid.x];
        more[0][simdgroup_index_in_threadgroup & 3] = float(threads_per_grid.x);
        metal::threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint row = thread_position_in_threadgroup.y;
        const float4 four = float4(tile[1], float2(tile[2]), more[0][row & 3]);
        out[thread_position_in_grid.x] = four[0] + four.w + dot_of(vec<float, 2>(four.xy));
    """
    header = "inline float dot_of(float2 x) { return x[0] * x[1]; }\n"
    found = figures(source, header, [("N", 32)], threads=(32, 8, 1))
    assert found.threads == 256
    assert found.kinds["plain"] > 0 and found.registers > 0


def test_each_call_is_recorded_once():
    recorder = proxy.Recorder()
    kernel = recorder.metal_kernel("probe", ["a"], ["out"], "out[0] = T(a[0]);")
    for dtype in (mx.float16, mx.float32, mx.float16):
        kernel(
            inputs=[mx.zeros(8)],
            template=[("T", dtype)],
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.float32],
        )
    assert [made.template["T"] for made in recorder.calls] == [mx.float16, mx.float32]
    assert {made.kernel for made in recorder.calls} == {"probe"}


def test_what_is_wrong_is_said():
    with pytest.raises(CompileError, match="probe:1"):
        figures("out[0] = nothing;")
    with pytest.raises(ValueError, match="probe: the proxy does not define grid_origin"):
        figures("out[0] = grid_origin.x;")
    with pytest.raises(ValueError, match="no kernel of the name probe"):
        proxy.read("other:\n", "probe")
