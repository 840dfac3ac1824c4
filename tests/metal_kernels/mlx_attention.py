# SPDX-License-Identifier: Apache-2.0
"""MLX's own attention kernels from its wheel, which calibrate the proxy.

Their performance on Macs is public: docs/kernel-checks.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from metal_interpreter import proxy

HEADER = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/sdpa_vector.h"

_ARRAYS = ("queries", "keys", "values")
_OUTPUTS = ("out", "sums", "maxs")
_STRIDES = ("k_head", "k_seq", "v_head", "v_seq")
_HERE = "threadgroup_position_in_grid, threadgroups_per_grid"
_NO_MASK = "nullptr, nullptr, 0, 0, 0, nullptr"
# Values of each kernel's parameters after the arrays.
_ONE_PASS = f"gqa, N, {', '.join(_STRIDES)}, scale, {_NO_MASK}, 0, {_HERE}, SIMDGROUP, LANE"
_TWO_PASSES = (
    f"sums, maxs, N, {', '.join(_STRIDES)}, scale, {_NO_MASK}, threads_per_threadgroup, "
    f"thread_position_in_threadgroup, {_HERE}, LANE"
)
_GROUPED = (
    f"sums, maxs, N, {', '.join(_STRIDES)}, scale, {_HERE}, thread_position_in_threadgroup, LANE"
)


@dataclass(frozen=True)
class Attention:
    """One instance of an MLX kernel."""

    kernel: str
    arguments: tuple[int, ...]  # template arguments after the dtype
    threads: tuple[int, int, int]
    keys: int  # per round of its loop
    size: str
    registers: int  # that the proxy was calibrated with
    on_a_mac: str  # published performance, with its source

    def call(self) -> proxy.Call:
        """Returns MLX's launch with float16 and without masks and sinks."""
        given = {
            "sdpa_vector": _ONE_PASS,
            "sdpa_vector_2pass_1": _TWO_PASSES,
            "sdpa_vector_2pass_1_gqa": _GROUPED,
        }[self.kernel]
        given = given.replace("SIMDGROUP", "simdgroup_index_in_threadgroup")
        given = given.replace("LANE", "thread_index_in_simdgroup")
        arguments = ", ".join(map(str, self.arguments))
        recorder = proxy.Recorder()
        kernel = recorder.metal_kernel(
            self.kernel,
            input_names=(*_ARRAYS, "gqa", "N", *_STRIDES, "scale"),
            output_names=_OUTPUTS,
            source=f"{self.kernel}<half, {arguments}>(queries, keys, values, out, {given});",
            header=_header(HEADER.read_text()),
        )
        arrays = [mx.zeros(8, mx.float16)] * 3
        strides = [mx.array(1, mx.uint64)] * 4
        kernel(
            inputs=[*arrays, mx.array(1, mx.int32), mx.array(1, mx.int32), *strides, 1.0],
            output_shapes=[(8,)] * 3,
            output_dtypes=[mx.float16, mx.float32, mx.float32],
            grid=self.threads,
            threadgroup=self.threads,
        )
        return recorder.calls[0]


def _two_passes(size: int, registers: int, on_a_mac: str) -> Attention:
    arguments, what = (size, size, 4), f"{size}, 4 keys ahead"
    return Attention("sdpa_vector_2pass_1", arguments, (32, 8, 1), 4, what, registers, on_a_mac)


def _grouped(size: int, heads: int, registers: int, on_a_mac: str) -> Attention:
    arguments, what = (size, size, 8, heads), f"{size}, {heads} heads"
    return Attention(
        "sdpa_vector_2pass_1_gqa", arguments, (32, 8 // heads, 1), 1, what, registers, on_a_mac
    )


_M1 = "{} threads, so {} floats at most; M1 Max (mlx#3885)"
_TWO = "float and bfloat got a variant with 1 key ahead"
CALLS = (
    Attention("sdpa_vector", (256,), (1024, 1, 1), 1, "256", 43, _M1.format(1024, 52)),
    Attention("sdpa_vector", (512,), (1024, 1, 1), 1, "512", 68, _M1.format(832, 64)),
    _two_passes(128, 48, "kept as it is"),
    _two_passes(192, 63, _TWO),
    _two_passes(256, 79, _TWO),
    _grouped(128, 4, 68, "faster than a head at a time (mlx#4077)"),
    _grouped(64, 8, 86, "likewise (mlx#4380)"),
    _grouped(128, 8, 119, "“spills and loses” (mlx#4077)"),
)


def _header(text: str) -> str:
    """Converts MLX's text to functions for a kernel: passed by value, with constants set."""
    text = re.sub(r"#(pragma once|include .*)", "", text)
    text = re.sub(
        r"constant (bool|int) (\w+) \[\[function_constant\(\d+\)\]\];",
        lambda found: f"constant {found[1]} {found[2]} = {'0' if found[1] == 'bool' else '128'};",
        text,
    )
    text = re.sub(r"\[\[kernel\]\] void", "inline void", text)
    text = re.sub(r"\s*\[\[[^\]]*\]\]", "", text)
    text = re.sub(r"const constant (\w+)& ", r"const \1 ", text)
    return re.sub(
        r"^( +)threadgroup (\w+) (\w+\[.*\]);$",
        r"\1static threadgroup \2 \3 __attribute__((loader_uninitialized));",
        text,
        flags=re.MULTILINE,
    )
