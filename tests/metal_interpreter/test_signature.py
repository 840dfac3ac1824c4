# SPDX-License-Identifier: Apache-2.0
"""The generated function against what MLX itself records when it exports a kernel."""

import itertools

import mlx.core as mx
import pytest
from metal_interpreter.signature import Input, Mentions, Signature

HEADER = "// functions\n"


def mlx_text(folder, arrays, template, source, outputs, atomic):
    """Metal text as MLX generates it. Exporting needs no GPU, and the file holds the text."""
    names = [f"in{i}" for i in range(len(arrays))]
    kernel = mx.fast.metal_kernel(
        name="probe",
        input_names=names,
        output_names=[f"out{i}" for i in range(len(outputs))],
        source=source,
        header=HEADER,
        atomic_outputs=atomic,
    )

    def call(*inputs):
        return kernel(
            inputs=list(inputs),
            template=template,
            grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
            output_shapes=[(4,)] * len(outputs),
            output_dtypes=outputs,
        )

    path = folder / "probe.mlxfn"
    mx.export_function(str(path), call, *arrays)
    data = path.read_bytes().decode("latin1")
    begin = data.index(HEADER)
    # The text's length stands before it, as 64 bits.
    length = int.from_bytes(data[begin - 8 : begin].encode("latin1"), "little")
    return data[begin : begin + length]


def our_text(arrays, template, source, outputs, atomic):
    names = tuple(f"in{i}" for i in range(len(arrays)))
    signature = Signature(
        "probe",
        names,
        tuple(f"out{i}" for i in range(len(outputs))),
        tuple(Input.of(a) for a in arrays),
        tuple(outputs),
        tuple(template or ()),
        Mentions.of(source, names),
        atomic,
    )
    return signature.text(HEADER, source)


ARRAYS = {
    "device": lambda: [mx.zeros((4, 4), dtype=mx.bfloat16)],
    "constant": lambda: [mx.zeros((7,), dtype=mx.int64), mx.zeros((8,), dtype=mx.float16)],
    "scalar": lambda: [mx.array(2.5), mx.array(True), mx.array(3)],
    "every dtype": lambda: [
        mx.zeros((9,), dtype=t)
        for t in (mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32)
    ],
}
SOURCES = {
    "plain": "out0[thread_position_in_grid.x] = 0;",
    "shapes": "uint i = thread_index_in_simdgroup; // in0_shape in0_strides in0_ndim",
    "threads": "// threads_per_threadgroup simdgroup_index_in_threadgroup grid_size",
    "nothing": "out0[0] = 1;",
}
TEMPLATES = {
    "none": None,
    "all": [("T", mx.bfloat16), ("N", 3), ("flag", True), ("M", -1)],
    "false": [("flag", False)],
}


@pytest.mark.parametrize(
    ("arrays", "source", "template"), list(itertools.product(ARRAYS, SOURCES, TEMPLATES))
)
def test_text_is_mlx_s(arrays, source, template, tmp_path):
    outputs = [mx.float32] if source == "nothing" else [mx.float32, mx.uint8]
    case = (ARRAYS[arrays](), TEMPLATES[template], SOURCES[source], outputs, False)
    assert our_text(*case) == mlx_text(tmp_path, *case)


def test_atomic_outputs(tmp_path):
    case = ([mx.zeros((9,))], [("N", 1)], SOURCES["plain"], [mx.uint32], True)
    assert our_text(*case) == mlx_text(tmp_path, *case)
