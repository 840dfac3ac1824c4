# SPDX-License-Identifier: Apache-2.0
"""Lint rules for .metal files."""

import re
from pathlib import Path

import pytest
from metal_interpreter import lint

import metal_kernels

METAL = {path.name: path for path in sorted(Path(metal_kernels.__file__).parent.rglob("*.metal"))}


@pytest.mark.parametrize("name", METAL)
def test_the_text_of_our_kernels_keeps_the_rules(name):
    assert lint(METAL[name].read_text()) == []


HEADER = "inline float f(float x) { return x; }\n// ---- kernel body\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("// \N{MULTIPLICATION SIGN}\n", "1: .* not ASCII"),
        ("inline float f() { double x = 1; }", "1: .*double"),
        ("inline ulong f() {\n  return (unsigned long long)1; }", "2: .*long long"),
        ("inline int f() { auto g = [=](int a) { return a; }; return g(1); }", "lambda"),
        ("inline int f() { auto g = [] { return 1; }; return g(); }", "lambda"),
        ("inline int f() {\n  static int calls = 0;\n  return ++calls; }", "2: .*static"),
        ("inline int f() { static thread int x[4]; return x[0]; }", "static"),
        ("inline float f() { return -INFINITY; }", "infinities"),
        ("inline float f() { return HUGE_VALF; }", "infinities"),
        ("inline float f() { return numeric_limits<float>::infinity(); }", "infinities"),
        ("inline int f() { if constexpr (true) return 1; return 0; }", "if constexpr"),
        ("inline int f() { throw 1; }", "throw"),
        ("inline int f(int (*g)(int)) { return g(1); }", "function pointers"),
        ("inline float f() { return std::sqrt(2.0f); }", "library"),
        ("inline float f() {\n  return 0x1p-6f; }", "2: .*hexadecimal"),
        ("inline float f(float x) { return x * 0x1.8P+3f; }", "hexadecimal"),
        ("struct A { int x; };\nstruct B : A { int y; };\n", "2: .*derived"),
        ("struct A { int x; };\ntemplate <>\nstruct B<vec<half, 2>>\n  : public A {};", "3: .*de"),
        ("class A : B<int> { int x; };", "derived"),
        ("float scale = 1.0f;\n", "1: .*'constant'"),
        ("constexpr float scale = 1.0f;\n", "'constant'"),
        ("threadgroup float shared[4];\n// ---- kernel body\n", "1: .*body only"),
        ("inline void f() {\n  threadgroup float shared[4];\n}\n", "2: .*body only"),
        ("inline float f(const float* p) { return *p; }", "no address space"),
        ("inline float f(device float* p, float& x) { return x; }", "no address space"),
        ("inline float f(float (&rows)[4]) { return rows[0]; }", "no address space"),
        ("inline float f(device float* p) { return *(const vec<float, 2>*)p; }", "no address"),
        ("inline int f(int n) { return n > 0 ? f(n - 1) : 0; }", "recursion"),
        ("int g(int);\ninline int f(int n) { return g(n); }\nint g(int n) { return f(n); }",
         "2: .*'f' calls itself"),
        (HEADER + "const uint grid_size = 4;\n", "3: .*parameter that MLX adds"),
        (HEADER + "const uint my_grid_size = 4;\n", "3: .*contains the name"),
        (HEADER + "// of threads_per_grid\n", "3: .*comment"),
        (HEADER + "const int pool_shape = 4;\n", "3: .*may be the name"),
    ],
)  # fmt: skip
def test_text_that_breaks_a_rule(text, what):
    assert any(re.search(what, found) for found in lint(text)), lint(text)


@pytest.mark.parametrize(
    "text",
    [
        "// double, INFINITY and if constexpr in a comment\n",
        "constant int RUN = 4;\nstruct A { int x; static constexpr constant int n = 1; };\n",
        "template <typename T>\ninline T f(T a, T b) { return a * b + (a < b ? a : b); }",
        "struct A { int x; uint y : 3; uint f(bool b) { return b ? x : 1; } };",
        "inline uint f(uint x) { return x ^ 0x64806480u; }  // struct A : B of 0x1p-6f\n",
        "inline int f(device int* p) { return p[0] + p[1 + p[2]]; }",
        "inline void f(threadgroup float* t, thread float (&rows)[2][4]) { rows[0][0] = t[0]; }",
        "inline float f(const device half* p) { return float4(*(const device vec<half, 4>*)p).x; }",
        "inline float f(float x) { return x; }\ninline float g(float x) { return f(x); }",
        HEADER + "threadgroup float a[4];\nout[pool_shape[0] + thread_position_in_grid.x] = 1;\n",
        HEADER + "if (in[0] > 0 && thread_position_in_grid.x == 0) { return; }\n",
    ],
)  # fmt: skip
def test_text_that_keeps_the_rules(text):
    assert lint(text) == []
