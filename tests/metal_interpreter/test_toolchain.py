# SPDX-License-Identifier: Apache-2.0
"""Finding the compiler, and caching its results."""

import importlib.util
import struct
import sys
from contextlib import suppress
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import Checker, metal_kernel, toolchain

from metal_kernels import kernel, kv_blocks, kv_gather, kv_write, paged_attention
from metal_kernels.paged_attention import AttentionShape
from tests.metal_kernels.paged_attention.batches import make_batch


def run(value):
    kernel = metal_kernel("cached", [], ["out"], f"out[0] = {value}; // grid_size")
    (out,) = kernel(
        inputs=[],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.int32],
    )
    return out.item()


def test_libraries_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    assert run(41) == 41
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "interpreter").glob("*.*") if p.is_file()}
    assert sorted(p.name.split("-")[0] for p in made) == ["kernel", "runtime"]
    assert run(41) == 41
    assert {p: p.stat().st_mtime_ns for p in made} == made
    assert run(42) == 42
    kernels = list((tmp_path / "interpreter").glob("kernel-*"))
    assert len(kernels) == 2


def test_libraries_are_kept_where_everything_is(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_METAL_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (
        toolchain.cache_folder() == tmp_path / "Library" / "Caches" / "vllm-metal" / "interpreter"
    )


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    monkeypatch.delenv("VLLM_METAL_CLANG", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "ziglang" else find(n))
    with pytest.raises(RuntimeError, match=r"-m pip install ziglang\)"):
        run(43)


def test_a_compiler_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_METAL_CLANG", "/nowhere/clang++")
    with pytest.raises(RuntimeError, match="VLLM_METAL_CLANG must name a clang"):
        run(44)


def attend(num_rows):
    """Attends for a request's last rows over 600 tokens."""
    shape = AttentionShape(2, 1, 64, 64)
    batch = make_batch(np.random.default_rng(0), [(600 - num_rows, num_rows)], shape, mx.bfloat16)
    plan = paged_attention.plan(batch.starts, batch.seq_lens, batch.tables, batch.shape)
    pools = (batch.key_pool, batch.value_pool)
    paged_attention.run(plan, batch.queries, *pools, mx.zeros(8, mx.uint32), 0.1)


def write():
    rows, scales = mx.zeros((1, 2, 64)), [mx.zeros((2, 1, 16), mx.bfloat16) for _ in range(2)]
    pools = [mx.zeros((2, 1, 16, 64), mx.uint8) for _ in range(2)]
    kv_write.write(rows, rows, mx.array([3]), *pools, key_scales=scales[0], value_scales=scales[1])


CALLS = [
    lambda: attend(1),
    lambda: attend(20),
    write,
    lambda: kv_gather.gather(mx.zeros((2, 1, 16, 64)), mx.array([[0]]), mx.float16),
    lambda: kv_blocks.copy([mx.zeros((2, 4, 16, 20))], np.array([0]), np.array([1])),
]


@pytest.mark.parametrize("mode", ["run", pytest.param("check", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "calls", [CALLS[2:3], pytest.param(CALLS, marks=pytest.mark.more)], ids=len
)
def test_kernels_and_runtime_compile_for_a_mac(tmp_path, monkeypatch, mode, calls):
    """Stops before loading, which only a Mac can do."""
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path))
    monkeypatch.delenv("VLLM_METAL_CLANG", raising=False)
    monkeypatch.setattr("metal_interpreter.toolchain.sys.platform", "darwin")
    for call in calls:
        with (
            # One of its own: what this process has compiled for Linux before is not asked.
            kernel.using(partial(metal_kernel) if mode == "run" else Checker().metal_kernel),
            suppress(OSError),
        ):
            call()
    (runtime,) = (tmp_path / "interpreter").glob("runtime-*")
    kernels = list((tmp_path / "interpreter").glob("kernel-*.dylib"))
    assert runtime.name.startswith(f"runtime-{mode}-") and len(kernels) >= len(calls)
    for library in (runtime, *kernels):
        content = library.read_bytes()
        magic, processor, _, kind, _, _, flags = struct.unpack_from("<7I", content)
        # <mach-o/loader.h>: MH_MAGIC_64, CPU_TYPE_ARM64, MH_DYLIB.
        assert (magic, processor, kind) == (0xFEEDFACF, 0x0100000C, 6)
        assert flags & 0x1  # MH_NOUNDEFS
        # MH_WEAK_DEFINES, MH_BINDS_TO_WEAK: another kernel's function of the same name.
        assert not flags & 0x18000
        assert str(library).encode() in content and str(runtime).encode() in content
