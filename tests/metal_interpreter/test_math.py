# SPDX-License-Identifier: Apache-2.0
"""Every math, integer and common function of the shim against numpy and scipy."""

import math

import mlx.core as mx
import numpy as np
import pytest
import scipy.special
from metal_interpreter import metal_kernel

N = 64

REAL = {
    "exp": np.exp,
    "exp2": np.exp2,
    "exp10": lambda x: 10.0**x,
    "log": np.log,
    "log2": np.log2,
    "log10": np.log10,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "sinpi": lambda x: np.sin(np.pi * x),
    "cospi": lambda x: np.cos(np.pi * x),
    "tanpi": lambda x: np.tan(np.pi * x),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "rint": np.rint,
    "fabs": np.abs,
    "abs": np.abs,
    "fract": lambda x: x - np.floor(x),
    "sign": np.sign,
    "saturate": lambda x: np.clip(x, 0, 1),
    "precise::exp": np.exp,
    "fast::tanh": np.tanh,
}
REAL2 = {
    "pow(x, y)": lambda x, y: np.power(x, y),
    "powr(x, y)": lambda x, y: np.power(x, y),
    "atan2(x, y)": np.arctan2,
    "fmod(x, y)": np.fmod,
    "fmax(x, y)": np.maximum,
    "fmin(x, y)": np.minimum,
    "fdim(x, y)": lambda x, y: np.maximum(x - y, 0),
    "copysign(x, -y)": lambda x, y: np.copysign(x, -y),
    "max(x, y)": np.maximum,
    "min(x, y)": np.minimum,
    "divide(x, y)": np.divide,
    "fma(x, y, x)": lambda x, y: x * y + x,
    "clamp(x, T(0.3f), y)": lambda x, y: np.minimum(np.maximum(x, 0.3), y),
    "mix(x, y, T(0.25f))": lambda x, y: x + (y - x) * 0.25,
    "step(x, y)": lambda x, y: np.where(y < x, 0.0, 1.0),
    "smoothstep(T(0.0f), T(2.0f), x)": lambda x, y: (t := np.clip(x / 2, 0, 1)) ** 2 * (3 - 2 * t),
    "select(x, y, x < y)": np.maximum,
    "max3(x, y, T(0.5f))": lambda x, y: np.maximum(np.maximum(x, y), 0.5),
    "min3(x, y, T(0.5f))": lambda x, y: np.minimum(np.minimum(x, y), 0.5),
    "median3(x, y, T(0.5f))": lambda x, y: np.median([x, y, np.full_like(x, 0.5)], axis=0),
    "ldexp(x, 3)": lambda x, y: x * 8,
    "T(isnan(x / (y - y)) || isinf(x / (y - y)))": lambda x, y: np.ones_like(x),
    "T(isfinite(x) && !signbit(x) && signbit(-x))": lambda x, y: np.ones_like(x),
}
# Half a unit in the last place is one rounding of a result; products of functions round more often.
FLOATS = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def run(expressions, types, inputs, declare, dtype):
    """Returns (expressions, N) values of `dtype`; x and y are the thread's inputs."""
    lines = [f"out[{k} * {N} + i] = {e};" for k, e in enumerate(expressions)]
    kernel = metal_kernel(
        "functions",
        [f"in{k}" for k in range(len(inputs))],
        ["out"],
        "uint i = thread_position_in_grid.x;\n" + declare + "\n".join(lines),
    )
    (out,) = kernel(
        inputs=inputs,
        template=types,
        grid=(N, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(len(expressions), N)],
        output_dtypes=[dtype],
    )
    return np.array(out.astype(mx.float32)) if dtype == mx.bfloat16 else np.array(out)


def exact(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_real_functions(dtype):
    rng = np.random.default_rng(1)
    x = mx.array(rng.uniform(0.05, 0.95, N).astype(np.float32)).astype(dtype)
    y = mx.array(rng.uniform(0.05, 2.5, N).astype(np.float32)).astype(dtype)
    declare = "T x = in0[i], y = in1[i];\n"
    # acosh is real from 1 on.
    argument = {"acosh": "x + T(1.0f)"}
    expressions = [f"{f}({argument.get(f, 'x')})" for f in REAL] + list(REAL2)
    got = run(expressions, [("T", dtype)], [x, y], declare, dtype)
    x64, y64, shifted = exact(x), exact(y), exact(x + mx.array(1, dtype))
    wanted = [g(shifted if f == "acosh" else x64) for f, g in REAL.items()]
    with np.errstate(divide="ignore"):
        wanted += [g(x64, y64) for g in REAL2.values()]
    for expression, ours, theirs in zip(expressions, got, wanted, strict=True):
        error = np.abs(ours - theirs) / np.maximum(np.abs(theirs), 0.25)
        assert error.max() <= 8 * FLOATS[dtype], expression


INTEGER = {
    "popcount(x)": lambda x, y, b: bin(x % 2**b).count("1"),
    "clz(x)": lambda x, y, b: b - (x % 2**b).bit_length(),
    "ctz(x)": lambda x, y, b: b if x == 0 else ((x % 2**b) & -(x % 2**b)).bit_length() - 1,
    "reverse_bits(x)": lambda x, y, b: int(f"{x % 2**b:0{b}b}"[::-1], 2),
    "absdiff(x, y)": lambda x, y, b: abs(x - y),
    "hadd(x, y)": lambda x, y, b: (x + y) >> 1,
    "rhadd(x, y)": lambda x, y, b: (x + y + 1) >> 1,
    "mulhi(x, y)": lambda x, y, b: (x * y) >> b,
    "madhi(x, y, T(3))": lambda x, y, b: ((x * y) >> b) + 3,
    "rotate(x, T(5))": lambda x, y, b: ((x % 2**b) << 5 | (x % 2**b) >> (b - 5)) % 2**b,
    "max(x, y)": lambda x, y, b: max(x, y),
    "min(x, y)": lambda x, y, b: min(x, y),
    "clamp(x, T(2), T(9))": lambda x, y, b: min(max(x, 2), 9),
    "insert_bits(x, y, 2, 4)": lambda x, y, b: (x & ~0x3C) | ((y & 15) << 2),
}
SATURATING = {
    "addsat(x, y)": lambda x, y, low, high: min(max(x + y, low), high),
    "subsat(x, y)": lambda x, y, low, high: min(max(x - y, low), high),
}
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in (np.int8, np.uint16, np.int64)
        else pytest.param(kind, marks=pytest.mark.more)
        for kind in INTEGERS
    ],
)
def test_integer_functions(kind):
    bits = np.dtype(kind).itemsize * 8
    info = np.iinfo(kind)
    rng = np.random.default_rng(2)
    x, y = rng.integers(info.min, info.max, (2, N), dtype=kind, endpoint=True)
    x[:3] = [0, info.max, info.min]
    dtype = mx.array(x).dtype
    expressions = [*INTEGER, *SATURATING, "extract_bits(x, 1, 3)", "abs(x)"]
    declare = "T x = in0[i], y = in1[i];\n"
    got = run(expressions, [("T", dtype)], [mx.array(x), mx.array(y)], declare, dtype)

    def bits_1_to_3(a):
        field = a >> 1 & 7
        return field - 8 if info.min < 0 and field > 3 else field

    wanted = [
        [f(int(a), int(b), bits) for a, b in zip(x, y, strict=True)] for f in INTEGER.values()
    ]
    wanted += [
        [f(int(a), int(b), int(info.min), int(info.max)) for a, b in zip(x, y, strict=True)]
        for f in SATURATING.values()
    ]
    wanted += [[bits_1_to_3(int(a)) for a in x], [abs(int(a)) for a in x]]
    for expression, ours, theirs in zip(expressions, got, wanted, strict=True):
        wrapped = [v % 2**bits for v in theirs]
        assert [int(v) % 2**bits for v in ours] == wrapped, expression


def test_functions_of_several_results():
    x = np.linspace(-9.7, 9.9, N).astype(np.float32)
    declare = """float x = in0[i], whole, cosine; int exponent;
        float part = modf(x, whole), mantissa = frexp(x, exponent), sine = sincos(x, cosine);
    """
    names = ["part", "whole", "mantissa", "exponent", "sine", "cosine", "ilogb(x)"]
    got = run(names, None, [mx.array(x)], declare, mx.float32)
    mantissa, exponent = np.frexp(x)
    wanted = [*np.modf(x), mantissa, exponent, np.sin(x), np.cos(x), exponent - 1]
    for name, ours, theirs in zip(names, got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6, err_msg=name)


def test_functions_that_mlx_adds():
    x = np.linspace(-0.9, 2.0, N).astype(np.float32)
    expressions = ["log1p(x)", "expm1f(x)", "erf(x)", "float(ceildiv(int(i), 7))"]
    got = run(expressions, None, [mx.array(x)], "float x = in0[i];\n", mx.float32)
    wanted = [np.log1p(x), np.expm1(x), scipy.special.erf(x), -(-np.arange(N) // 7)]
    np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_vectors_go_through_component_by_component():
    x = np.linspace(0.1, 3.0, 4 * N).astype(np.float32)
    declare = "float4 x = ((const device float4*)in0)[i], y = x.wzyx;\n"
    sums = {
        "exp(x)": np.exp,
        "max(x, y)": lambda v: np.maximum(v, v[:, ::-1]),
        "clamp(x, 0.5f, 1.5f)": lambda v: np.clip(v, 0.5, 1.5),
        "fma(x, y, float4(1))": lambda v: v * v[:, ::-1] + 1,
        "select(x, y, x < 1.0f)": lambda v: np.where(v < 1, v[:, ::-1], v),
    }
    weights = np.array([1, 10, 100, 1000], np.float32)
    expressions = [f"dot({e}, float4(1, 10, 100, 1000))" for e in sums]
    others = {
        "length(x)": lambda v: np.linalg.norm(v, axis=1),
        "length(x.xyz)": lambda v: np.linalg.norm(v[:, :3], axis=1),
        "distance(x.xy, x.zw)": lambda v: np.linalg.norm(v[:, :2] - v[:, 2:], axis=1),
        "normalize(x).z": lambda v: v[:, 2] / np.linalg.norm(v, axis=1),
        "cross(x.xyz, float3(1, 2, 3)).y": lambda v: np.cross(v[:, :3], [1, 2, 3])[:, 1],
        "float(any(x > 2.9f)) + 2 * float(all(x > 1.0f))": lambda v: (
            np.any(v > 2.9, axis=1) + 2.0 * np.all(v > 1, axis=1)
        ),
        "length_squared(x)": lambda v: (v * v).sum(axis=1),
    }
    got = run([*expressions, *others], None, [mx.array(x)], declare, mx.float32)
    v = x.reshape(N, 4)
    wanted = [f(v) @ weights for f in sums.values()] + [f(v) for f in others.values()]
    for name, ours, theirs in zip([*sums, *others], got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)


def test_maximum_gives_way_to_a_number():
    source = ["fmax(x, 1.0f)", "max(1.0f, x)", "simd_max(i % 32 == 3 ? 1.0f : x)"]
    got = run(source, None, [mx.full((N,), math.nan)], "float x = in0[i];\n", mx.float32)
    assert np.all(got == 1)
