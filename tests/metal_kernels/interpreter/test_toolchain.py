# SPDX-License-Identifier: Apache-2.0
"""Finding the compiler, and keeping what it made."""

import importlib.util
import sys

import mlx.core as mx
import pytest

from metal_kernels.interpreter import metal_kernel, toolchain


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
