# SPDX-License-Identifier: Apache-2.0
"""Recording of graphs."""

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels import kernel
from metal_kernels.paged_attention.fused import is_fused
from vllm_metal.cli.fit.graph import record, recordable


def kinds(graph):
    return [operation.kind for operation in graph.operations]


def test_operations_come_with_their_arrays_and_nothing_is_computed():
    huge = mx.zeros((1 << 20, 1 << 20), mx.int8)  # a TiB, were it computed
    graph = record(lambda x: [x.T + x], [huge])
    assert kinds(graph) == ["Transpose", "Add"]
    (out,) = graph.outputs
    assert graph.arrays[out] == ((1 << 20, 1 << 20), mx.int8)
    assert graph.operations[1].inputs == (*graph.operations[0].outputs, *graph.inputs)


def test_a_compiled_function_is_one_operation():
    x = mx.zeros((4, 8))
    assert len(kinds(record(lambda x: [nn.silu(x)], [x]))) > 1
    with recordable(metal=False):
        graph = record(lambda x: [nn.silu(x)], [x])
    (opaque,) = (operation for operation in graph.operations if operation.opaque)
    assert (opaque.inputs, opaque.outputs) == (graph.inputs, graph.outputs)
    assert len(kinds(record(lambda x: [nn.silu(x)], [x]))) > 1  # as before


def test_what_is_one_operation_on_metal_only():
    x = mx.zeros((4, 8))

    def normed(x):
        return [mx.fast.rms_norm(x, None, 1e-5)]

    with recordable(metal=False):
        assert not any(operation.opaque for operation in record(normed, [x]).operations)
    with recordable(metal=True):
        assert [op.opaque for op in record(normed, [x]).operations if op.kind != "Full"][-1]


def test_a_kernel_is_one_operation_that_takes_over_no_input(tmp_path):
    (tmp_path / "twice.metal").write_text("// ---- kernel body\nout[0] = x[0];\n")
    twice = kernel.load(tmp_path / "twice.metal", ("x",), ("out", "token"))

    def build(x):
        shapes = {"output_shapes": [x.shape, (8,)], "output_dtypes": [x.dtype, mx.uint32]}
        return twice(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), template=[], **shapes)

    with recordable(metal=True):
        graph = record(build, [mx.zeros((4, 8))])
    (opaque,) = (operation for operation in graph.operations if operation.opaque)
    assert opaque.inputs == graph.inputs * 2  # twice: see peak
    assert [graph.arrays[name] for name in opaque.outputs] == [
        ((4, 8), mx.float32),
        ((8,), mx.uint32),
    ]


def test_an_operation_that_mlx_does_not_show_is_named():
    with pytest.raises(ValueError, match=r"cannot be estimated: .*FromFP8"):
        record(lambda x: [mx.from_fp8(x)], [mx.zeros(8, mx.uint8)])


@pytest.mark.skipif(mx.default_device().type == mx.DeviceType.gpu, reason="has such kernels")
def test_recording_for_metal_leaves_no_fused_kernels_behind_on_a_cpu():
    device = mx.default_device().type
    with recordable(metal=True):
        is_fused(192, 192, mx.bfloat16, device)
    assert not is_fused(192, 192, mx.bfloat16, device)
