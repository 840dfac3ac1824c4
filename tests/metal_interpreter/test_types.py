# SPDX-License-Identifier: Apache-2.0
"""Scalars, vectors and limits: layout, conversion, arithmetic, and what Metal refuses."""

import re

import mlx.core as mx
import numpy as np
import pytest
import torch
from metal_interpreter import CompileError, metal_kernel


def values(*expressions, declare="", inputs=(), dtype=mx.float32, count=1):
    """Returns one array (expressions, count); thread i computes column i."""
    lines = [f"out[{k * count} + i] = {e};" for k, e in enumerate(expressions)]
    names = [f"in{k}" for k in range(len(inputs))]
    source = "uint i = thread_position_in_grid.x;\n" + declare + "\n" + "\n".join(lines)
    (out,) = metal_kernel("types", names, ["out"], source)(
        inputs=list(inputs),
        grid=(count, 1, 1),
        threadgroup=(min(count, 1024), 1, 1),
        output_shapes=[(len(expressions), count)],
        output_dtypes=[dtype],
    )
    return np.array(out)


def test_sizes_and_alignments():
    sizes = {"half": 2, "bfloat": 2, "long": 8, "ulong": 8, "size_t": 8, "float2": 8, "float3": 16}
    sizes |= {"float4": 16, "half3": 8, "bfloat4": 8, "uchar4": 4, "bool4": 4, "bool": 1}
    sizes |= {"packed_float3": 12, "ulong4": 32, "simdgroup_float8x8": 8}
    got = values(*(f"sizeof({t})" for t in sizes), *(f"alignof({t})" for t in ("float3", "half4")))
    assert got.ravel().tolist() == [*sizes.values(), 16, 8]


def test_every_bfloat_from_float_and_back():
    """Tries all upper halves, with lower halves around the tie that rounds to even."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = upper | low
        floats = bits.view(np.float32)
        got = values(
            "as_type<ushort>(bfloat(in0[i]))",
            inputs=[mx.array(floats)],
            dtype=mx.uint16,
            count=2**16,
        )[0]
        number = ~np.isnan(floats)
        wanted = torch.from_numpy(floats).bfloat16().view(torch.uint16).numpy()
        np.testing.assert_array_equal(got[number], wanted[number])
        back = (got.astype(np.uint32) << 16).view(np.float32)
        assert np.all(np.isnan(back) == ~number)


def test_half_and_bfloat_round_after_every_operation():
    declare = "half a = half(in0[0]), b = half(in0[1]); bfloat c = bfloat(in0[2]), d = bfloat(b);"
    inputs = [mx.array([2048.0, 1.0, 256.0])]
    got = values("float(a + b + b)", "float(c + d + d)", declare=declare, inputs=inputs)
    assert got.ravel().tolist() == [2048, 256]


def test_a_bfloat_with_a_float_is_a_float():
    declare = "bfloat a = bfloat(256.0f); auto b = a + 1.0f; static_assert(is_same_v<decltype(b), "
    assert values("b", declare=declare + 'float>, "");').item() == 257


def test_building_vectors():
    declare = """
        float2 a(1, 2); float3 b(a, 3); float4 c = float4(0, b); float4 d = {a, a.yx};
        half4 e = half4(c); vec<bfloat, 4> f = vec<bfloat, 4>(c * 2.0f); uint4 g = uint4(d);
        float4 h = 7; c.xz = a; d.w += 10; c.yw *= 2.0f; b.zyx = b;
    """
    got = values(
        *(f"c[{k}]" for k in range(4)),
        *(f"d[{k}]" for k in range(4)),
        *("b.x", "b.y", "b.z", "float(e.w)", "float(f.z)", "g.z", "h.w", "a.r + a.g"),
        declare=declare,
    ).ravel()
    c, d, b = [1, 2, 2, 6], [1, 2, 2, 11], [3, 2, 1]
    assert got.tolist() == [*c, *d, *b, 3, 4, 2, 7, 3]


def test_vector_arithmetic():
    types, declare, expressions = ["float", "half", "bfloat", "int", "ushort"], "", []
    for type in types:
        a, b, c, less = (f"{type}_{name}" for name in ("a", "b", "c", "less"))
        declare += f"""
            {type}4 {a} = {type}4({type}(8), {type}(9), {type}(10), {type}(12)), {b}({type}(3));
            {type}4 {c} = ({a} + {b}) * {b} - {a} / {type}4({type}(2)); {c} -= {b}; {c} = +{c};
            bool4 {less} = {a} < {a}.wzyx;
        """
        expressions += [f"float({c}[{k}])" for k in range(4)]
        expressions.append(f"{less}.x + 2 * {less}.y + 4 * {less}.w")
    got = values(*expressions, declare=declare).reshape(len(types), 5)
    a = np.array([8, 9, 10, 12])
    for type, found in zip(types, got, strict=True):
        half_a = a // 2 if type in ("int", "ushort") else a / 2
        assert found.tolist() == [*((a + 3) * 3 - half_a - 3), 3], type


def test_integer_vectors():
    declare = "uint4 a(1, 2, 3, 4); uint4 b = (a << 4u | 1u) ^ ~a; int2 c = -int2(5, 6) % 4; a++;"
    declare = declare.replace("a++;", "++a;")
    got = values(*(f"b[{k}]" for k in range(4)), "uint(c.y + 100)", "a.w", declare=declare,
                 dtype=mx.uint32).ravel()  # fmt: skip
    wanted = [((a << 4 | 1) ^ ~a) % 2**32 for a in (1, 2, 3, 4)]
    assert got.tolist() == [*wanted, 98, 5]


def test_same_bits_as_another_type():
    got = values(
        "as_type<uint>(1.0f)",
        "as_type<uint>(half2(1.0h, -2.0h))",
        "as_type<ushort>(bfloat(1.0f))",
        "as_type<uint>(uchar4(1, 2, 3, 4))",
        dtype=mx.uint32,
    ).ravel()
    assert got.tolist() == [0x3F800000, 0xC0003C00, 0x3F80, 0x04030201]


def test_loads_need_only_an_element_s_alignment():
    """MLX's CPU memory is aligned less than a GPU's."""
    for offset in range(4):
        x = mx.arange(64).astype(mx.float32)[offset:]
        mx.eval(x)
        got = values("((const device float4*)in0)[i].w", inputs=[x], count=8)[0]
        np.testing.assert_array_equal(got, np.arange(8) * 4 + 3 + offset)


def test_limits():
    kinds = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)
    limits = [
        f"ulong(numeric_limits<{np.dtype(kind).name}_t>::{limit}())"
        for kind in kinds
        for limit in ("max", "min")
    ]
    wanted = [limit % 2**64 for kind in kinds for limit in (np.iinfo(kind).max, np.iinfo(kind).min)]
    assert values(*limits, dtype=mx.uint64).ravel().tolist() == wanted
    names = {"float": torch.float32, "half": torch.float16, "bfloat": torch.bfloat16}
    expressions, wanted = [], []
    for name, kind in names.items():
        info = torch.finfo(kind)
        expressions += [
            *(f"float(numeric_limits<{name}>::{f}())" for f in ("max", "min", "lowest", "epsilon")),
            f"float(numeric_limits<{name}>::infinity())",
            f"float(Limits<{name}>::min)",
            f"float(Limits<{name}>::finite_min)",
        ]
        wanted += [
            *(info.max, info.smallest_normal, -info.max, info.eps, np.inf, -np.inf, -info.max)
        ]
    assert values(*expressions).ravel().tolist() == [float(w) for w in wanted]


REFUSED = [
    "bfloat x = 1.0f;",
    "bfloat x; x = 2.0f * bfloat(1.0f);",
    "float4 x = int4(1);",
    "half4 y; float4 x = y;",
    "float4 x = float4(1, 2, 3);",
    "float3 x = float3(float2(1), float2(2));",
    "double x = 1; auto y = [&]<typename T>(T z) { return z; }; y(x);",
    "float x = max(1.0f, half(2));",
    "atomic<short> x;",
    "simdgroup_matrix<float, 4, 4> m;",
    "std::vector<int> v;",
]


def test_what_metal_refuses():
    """Each has its own error, in its line or in what that instantiates."""
    declare = "".join(
        f'#line {number} "refused"\n{{ {text} }}\n' for number, text in enumerate(REFUSED, 100)
    )
    with pytest.raises(CompileError) as caught:
        values("0", declare=declare)
    named = re.findall(r"refused:(\d+):\d+: (?:error|note)", str(caught.value))
    lines = {int(line) for line in named}
    assert lines == set(range(100, 100 + len(REFUSED)))
