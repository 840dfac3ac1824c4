# SPDX-License-Identifier: Apache-2.0
"""Calling kernels as with mx.fast.metal_kernel: buffers, grids, templates, errors."""

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import CompileError, KernelViolation, metal_kernel

from tests.metal_kernels.elf import reads_elf

INDEX = "uint i = thread_position_in_grid.x;\n"


def launch(source, inputs, shape=(64,), dtype=mx.float32, header="", **call):
    kernel = metal_kernel(
        name="probe",
        input_names=[f"in{i}" for i in range(len(inputs))],
        output_names=["out"],
        source=source,
        header=header,
    )
    call = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), **call}
    (out,) = kernel(inputs=inputs, output_shapes=[shape], output_dtypes=[dtype], **call)
    return out


def as_numpy(array):
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


DTYPES = (mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32)
DTYPES += (mx.int64, mx.float16, mx.bfloat16, mx.float32)


def test_every_dtype_goes_in_and_out():
    given = [
        (mx.arange(64) % 2 if dtype == mx.bool_ else mx.arange(64)).astype(dtype)
        for dtype in DTYPES
    ]
    names = [f"in{place}" for place in range(len(given))]
    copies = "".join(f"out_{name}[i] = {name}[63 - i];\n" for name in names)
    kernel = metal_kernel("probe", names, [f"out_{name}" for name in names], INDEX + copies)
    outputs = kernel(
        inputs=given,
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        output_shapes=[(64,)] * len(given),
        output_dtypes=list(DTYPES),
    )
    for x, out in zip(given, outputs, strict=True):
        assert out.dtype == x.dtype
        np.testing.assert_array_equal(as_numpy(out), as_numpy(x)[::-1])


def test_writing_through_an_input_changes_the_array():
    pool = mx.zeros((4, 16), dtype=mx.bfloat16)
    launch(INDEX + "((device bfloat16_t*)in0)[i] = bfloat16_t(float(i));", [pool], shape=(1,))
    np.testing.assert_array_equal(as_numpy(pool).ravel(), np.arange(64))


def test_a_lazy_input_is_evaluated():
    x = mx.arange(64).astype(mx.float32) * 2 + 1
    out = launch(INDEX + "out[i] = in0[i];", [x])
    np.testing.assert_array_equal(np.array(out), np.arange(64) * 2 + 1)


def test_strided_inputs_are_copied_only_if_asked():
    x = mx.arange(128).astype(mx.float32)[::2]
    np.testing.assert_array_equal(
        np.array(launch(INDEX + "out[i] = in0[i];", [x])), np.arange(0, 128, 2)
    )
    kernel = metal_kernel(
        "probe",
        ["x"],
        ["out"],
        INDEX + "out[i] = x[i * x_strides[0]] + x_shape[0] + x_ndim;",
        ensure_row_contiguous=False,
    )
    (out,) = kernel(
        inputs=[x],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    np.testing.assert_array_equal(np.array(out), np.arange(0, 128, 2) + 65)


def test_shapes_and_strides_are_those_of_the_array():
    x = mx.zeros((2, 3, 5), dtype=mx.uint8)
    source = "out[0] = in0_shape[2] * 100 + in0_strides[0] + in0_ndim * 1000; // "
    out = launch(source + "threads_per_grid", [x], shape=(8,), grid=(1, 1, 1), init_value=0)
    assert out[0].item() == 3 * 1000 + 5 * 100 + 15


def test_scalars_become_arrays_without_dimensions():
    out = launch(INDEX + "out[i] = in0 * i + in1 + (in2 ? 0.25f : 0.0f);", [0.5, 3, True])
    np.testing.assert_array_equal(np.array(out), np.arange(64) * 0.5 + 3.25)


def test_template_arguments():
    source = INDEX + "T v = T(in0[i]); out[i] = flag ? float(v) + N : 0.0f;"
    x = mx.arange(64).astype(mx.float32) / 3
    for dtype, flag, n in ((mx.float16, True, 2), (mx.float16, 1, 2), (mx.bfloat16, False, 5)):
        template = [("T", dtype), ("flag", flag), ("N", n)]
        out = launch(source, [x], template=template)
        expected = as_numpy(x.astype(dtype)).astype(np.float32) + n if flag else np.zeros(64)
        np.testing.assert_array_equal(np.array(out), expected)


def test_outputs_are_not_cleared_unless_asked():
    assert mx.all(mx.isnan(launch("if (in0[0] > 9) out[0] = 1;", [mx.zeros((8,))])))
    out = launch("if (in0[0] > 9) out[0] = 1;", [mx.zeros((8,))], init_value=2.5)
    assert mx.all(out == 2.5)


def test_a_partly_filled_grid():
    """100 x 3 threads in threadgroups of 32 x 2: the last ones are smaller."""
    source = """
        uint3 p = thread_position_in_grid;
        out[p.y * 100 + p.x] = threads_per_threadgroup.x + 1000 * threads_per_threadgroup.y
            + 10000 * threadgroup_position_in_grid.x + 100000 * threadgroups_per_grid.x
            + 1000000 * simdgroups_per_threadgroup;
    """
    out = launch(source, [0], (3, 100), mx.int32, grid=(100, 3, 1), threadgroup=(32, 2, 1))
    y, x = np.mgrid[:3, :100]
    width = np.where(x < 96, 32, 4)
    height = np.where(y < 2, 2, 1)
    expected = width + 1000 * height + 10000 * (x // 32) + 400000
    expected += 1000000 * -(-width * height // 32)
    np.testing.assert_array_equal(np.array(out), expected)


def test_positions_within_a_threadgroup():
    source = """
        uint i = thread_index_in_threadgroup + 64 * threadgroup_position_in_grid.y;
        out[i] = thread_index_in_simdgroup + 100 * simdgroup_index_in_threadgroup
            + 1000 * thread_position_in_threadgroup.x + 100000 * thread_position_in_threadgroup.y;
    """
    out = launch(source, [0], (128,), mx.int32, grid=(16, 8, 1), threadgroup=(16, 4, 1))
    i = np.arange(128) % 64
    expected = i % 32 + 100 * (i // 32) + 1000 * (i % 16) + 100000 * (i // 16)
    np.testing.assert_array_equal(np.array(out), expected)


def test_threadgroup_variables():
    source = """
        threadgroup float a[64], b[2][N * 16]; /* two
            lines */ threadgroup int
            counts[64];
        threadgroup T single;
        threadgroup float* pointer = a;
        uint i = thread_position_in_grid.x, l = thread_position_in_threadgroup.x;
        pointer[l] = i;
        b[l / 32][l % 32] = 1000 + i;
        counts[l] = l;
        if (l == 5) single = T(i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[63 - l] + b[(63 - l) / 32][(63 - l) % 32] + counts[63 - l] + float(single);
    """
    template = [("T", mx.bfloat16), ("N", 2)]
    out = launch(source, [0], (128,), grid=(128, 1, 1), template=template)
    i, local = np.arange(128), np.arange(128) % 64
    first, mirrored = i - local, 63 - local
    wanted = 2 * (first + mirrored) + 1000 + mirrored + first + 5
    np.testing.assert_array_equal(np.array(out), wanted)


def test_threadgroup_memory_starts_undefined_in_every_threadgroup():
    source = """
        threadgroup float a[8];
        uint g = threadgroup_position_in_grid.x, l = thread_position_in_threadgroup.x;
        if (g == 0) a[l] = 1;
        out[g * 8 + l] = a[l];
    """
    out = np.array(launch(source, [0], (16,), grid=(16, 1, 1), threadgroup=(8, 1, 1)))
    assert np.all(out[:8] == 1)
    assert np.all(np.isnan(out[8:]))


def test_more_threadgroup_memory_than_a_gpu_has():
    source = "threadgroup float a[8192]; threadgroup half b; a[0] = 0; b = 0; out[0] = 0;"
    with pytest.raises(KernelViolation, match=r"'b'.*32770 bytes.*32768") as caught:
        launch(source, [0])
    assert caught.value.kind == "threadgroup_memory"
    assert caught.value.kernel == "probe"


DIVERGENT = """
    if (thread_position_in_grid.x < 3) threadgroup_barrier(mem_flags::mem_none);
    else
        threadgroup_barrier(mem_flags::mem_none);
    out[0] = 1;
"""


def test_threads_at_different_barriers():
    with pytest.raises(KernelViolation, match=r"3 at threadgroup_barrier.*; 61 at threadgroup_b"):
        launch(DIVERGENT, [0])


@reads_elf
def test_the_lines_of_different_barriers():
    with pytest.raises(KernelViolation, match=r"3 at threadgroup_barrier probe:2.*61.*probe:4"):
        launch(DIVERGENT, [0])


def test_where_lines_are_unknown_a_message_has_none(monkeypatch):
    """A Mac's files are no ELF, so lines are unknown there."""
    monkeypatch.setattr("metal_interpreter.lines.rows", lambda library: 1 / 0)
    places = "3 at threadgroup_barrier; 61 at threadgroup_barrier$"
    with pytest.raises(KernelViolation, match=places):
        launch(DIVERGENT.replace("= 1", "= 2"), [0])


def test_branches_that_look_alike_are_not_made_one():
    header = """
        float meet(float x) { return simd_sum(x); }
    """
    source = INDEX + "if (i < 20) out[i] = meet(1.0f); else out[i] = meet(100.0f);"
    out = launch(source, [0], (32,), header=header, grid=(32, 1, 1))
    np.testing.assert_array_equal(np.array(out), np.where(np.arange(32) < 20, 20, 1200))


def test_compile_errors_name_the_line():
    with pytest.raises(CompileError, match=r"probe:2:.*'float' to 'bfloat16_t'"):
        launch(INDEX + "bfloat16_t x = 1.0f; out[i] = x;", [0])
    with pytest.raises(CompileError, match=r"kernel\.metal:7"):
        launch('#line 7 "kernel.metal"\nout[0] = missing;', [0])


def test_verbose_prints_the_metal_text(capfd):
    launch(INDEX + "out[i] = N;", [0], template=[("N", 4)], verbose=True)
    printed = capfd.readouterr().out
    assert "template <int N>\n[[kernel]] void custom_kernel_probe__4_int32_ts_float(" in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": [1.0]}, "Expected `inputs` to have size 2 but got size 1"),
        ({"output_shapes": []}, "Expected `output_shapes` to have size 1"),
        ({"output_dtypes": []}, "Expected `output_dtypes` to have size 1"),
        ({"threadgroup": (1025, 1, 1)}, r"Thread group size \(1025\)"),
        ({"grid": (0, 1, 1)}, "empty grid"),
        ({"template": [("N", 1.5)]}, "Invalid template argument"),
    ],
)
def test_calls_mlx_refuses(change, message):
    kernel = metal_kernel("probe", ["a", "b"], ["out"], "out[0] = a + b;")
    call = {
        "inputs": [1.0, 2.0],
        "grid": (1, 1, 1),
        "threadgroup": (1, 1, 1),
        "output_shapes": [(1,)],
        "output_dtypes": [mx.float32],
    }
    with pytest.raises(ValueError, match=message):
        kernel(**{**call, **change})


def test_kernels_mlx_refuses():
    with pytest.raises(ValueError, match="at least one output"):
        metal_kernel("probe", [], [], "")
    with pytest.raises(ValueError, match="math_mode"):
        metal_kernel("probe", [], ["out"], "", compile_options={"math_mode": "wild"})
    with pytest.raises(ValueError, match="Unknown compile option"):
        metal_kernel("probe", [], ["out"], "", compile_options={"speed": "high"})


def test_more_buffers_than_metal_binds():
    with pytest.raises(ValueError, match="Metal binds 31"):
        launch("out[0] = 0;", [0] * 31)
    launch("out[0] = 0;", [0] * 30, grid=(1, 1, 1))
