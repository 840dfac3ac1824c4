# SPDX-License-Identifier: Apache-2.0
"""Address spaces in our kernels, and planted errors."""

import itertools
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import CompileError, Strict
from pairs import valuewise

import metal_kernels
from metal_kernels import kernel
from metal_kernels.kv_write import RotationKind
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.paged_attention.op import HEAD_SIZES, LATENT_SIZES
from tests.metal_kernels.launches import attend, convolve, gather, move, recur, rotate, write

F16, BF16, F32, FP8, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.uint8, mx.int8
VALUES = (F16, BF16, F32)
CODES = (FP8, INT8)
METAL = {path.name: path for path in sorted(Path(metal_kernels.__file__).parent.rglob("*.metal"))}


SHAPE = AttentionShape(4, 2, 128, 128)
LATENT = AttentionShape(16, 1, *LATENT_SIZES[0])
STEPS = {  # (computed, rows) of each request
    "decode": [(20, 1)],
    "verify": [(20, 3)],
    "prefill": [(0, 40)],
    "decode in parts": [(600, 1)],
    "prefill in parts": [(600, 40)],
}


#: Dtypes of rows and of the pool, None for the same.
POOLS = list(zip(VALUES, (None, *CODES), strict=True))


@valuewise(head_size=HEAD_SIZES, step=list(STEPS), pool=POOLS)
def test_attention_keeps_to_its_address_spaces(head_size, step, pool):
    shape = AttentionShape(4, 2, head_size, head_size)
    strict = Strict()
    with kernel.using(strict.metal_kernel):
        attend(STEPS[step], shape, *pool)
    kind = step.split()[0].replace("verify", "decode")
    found = [name.split("_")[2] for name in strict.functions]
    assert sorted(found) == ([kind, "reduce"] if "parts" in step else [kind])


@valuewise(step=["decode", "prefill", "decode in parts"], dtype=VALUES)
def test_latent_attention_keeps_to_its_address_spaces(step, dtype):
    with kernel.using(Strict().metal_kernel):
        attend(STEPS[step], LATENT, dtype)


@pytest.mark.parametrize(
    "pools",
    [
        pytest.param([(F16, FP8), (BF16, INT8), (F32, F16)], id="some"),
        pytest.param(
            list(itertools.product(VALUES, VALUES + CODES)), id="all", marks=pytest.mark.slow
        ),
    ],
)
def test_kernels_of_the_cache_keep_to_their_address_spaces(pools):
    """Runs writes and gathers, of rows and of pools."""
    strict = Strict()
    with kernel.using(strict.metal_kernel):
        for dtype, cache in pools:
            write(dtype, cache)
            gather(dtype, cache)
    assert len(strict.functions) == 2 * len(pools)


def test_rotations_and_sizes_that_fill_no_lane_keep_to_their_address_spaces():
    strict = Strict()
    with kernel.using(strict.metal_kernel):
        write(BF16, FP8, key_size=576, value_size=None)
        write(F16, F16, key_size=7, value_size=9)
        rotate(BF16, FP8, RotationKind(64))
        rotate(F16, F16, RotationKind(64, 512, True, True), 576, values=False)
    assert len(strict.functions) == 4


@pytest.mark.parametrize(
    "dtype",
    [
        dtype if dtype in (F16, INT8) else pytest.param(dtype, marks=pytest.mark.slow)
        for dtype in VALUES + CODES
    ],
    ids=str,
)
def test_kernels_that_move_blocks_keep_to_their_address_spaces(dtype):
    strict = Strict()
    with kernel.using(strict.metal_kernel):
        move(dtype)
    # Two of a pool and two of its scales, which are float32, and two of states.
    assert len(strict.functions) == 6


@pytest.mark.parametrize(
    ("dtype", "cache", "key_size", "decays"),
    [
        pytest.param(*kind, marks=pytest.mark.more if place < 3 else pytest.mark.slow)
        for place, kind in enumerate(
            [
                *((F16, None, 9, 1), (BF16, FP8, 20, 2), (F32, INT8, 128, 0)),
                *((dtype, cache, 8, 0) for dtype in VALUES for cache in (None, *CODES)),
                *((BF16, None, size, decays) for size in (9, 20, 128) for decays in range(3)),
            ]
        )
    ],
    ids=str,
)
def test_kernels_of_states_keep_to_their_address_spaces(dtype, cache, key_size, decays):
    strict = Strict()
    with kernel.using(strict.metal_kernel):
        convolve(dtype, cache)
        recur(dtype, cache, key_size, decays)
    assert len(strict.functions) == 2


# File, text and what it is replaced by, and the text of the line that clang must name if it is
# not the same one.
MISTAKES = {
    "a pointer without its address space": (
        "decode.metal",
        "void load(const device C* row",
        "void load(const C* row",
        "Keys::load(row",
    ),
    "a reference without its address space": (
        "decode.metal",
        "const device Request& request =",
        "const Request& request =",
        None,
    ),
    "a reference of another space": (
        "prefill.metal",
        "const device Tile& tile =",
        "const threadgroup Tile& tile =",
        None,
    ),
    "device memory given as threadgroup memory": (
        "prefill.metal",
        "D, base, first, end, thread_index, tile_memory);",
        "D, base, first, end, thread_index, queries);",
        "stage<T, C, D, KEYS, STRIDE, THREADS, SCALED>(",
    ),
    "threadgroup memory taken for device memory": (
        "prefill.metal",
        "threadgroup float* sums = score_memory",
        "device float* sums = score_memory",
        None,
    ),
    "private memory taken for threadgroup memory": (
        "decode.metal",
        "thread uint4 (&raw)[CHUNKS]",
        "threadgroup uint4 (&raw)[CHUNKS]",
        "Keys::load(row",
    ),
    "a member of another space": (
        "attention.metal",
        "const device int* table;",
        "const constant int* table;",
        "table = request_table;",
    ),
    "a pointer returned into another space": (
        "numeric.metal",
        "inline float decode_element(float value) {",
        "inline const device float* moved(const threadgroup float* p) { return p; } "
        "inline float decode_element(float value) {",
        None,
    ),
    "a cast into another space": (
        "prefill.metal",
        "*(const device metal::vec<C, WIDE>*)(pool",
        "*(const threadgroup metal::vec<C, WIDE>*)(pool",
        None,
    ),
    "a cast that loses the space": (
        "decode.metal",
        "(const device uint4*)(row",
        "(const uint4*)(row",
        None,
    ),
    "a const_cast into another space": (
        "kv_write.metal",
        "const_cast<device C*>(key_pool)",
        "const_cast<threadgroup C*>(key_pool)",
        None,
    ),
    "a write to a constant argument": (
        "decode.metal",
        "const int num_heads = queries_shape[1];",
        "const int num_heads = queries_shape[1] = 1;",
        None,
    ),
    "a write to a constant": (
        "reduce.metal",
        "total = 0.0f;",
        "total = LOWEST = 0.0f;",
        None,
    ),
    "a write to an input": (
        "kv_gather.metal",
        "device T* target = context",
        "device C* target = pool",
        None,
    ),
    "a threadgroup variable in a function": (
        "kv_write.metal",
        "float row[RUNS][RUN];",
        "threadgroup float row[RUNS][RUN];",
        None,
    ),
    "a threadgroup variable with a constructor": (
        "prefill.metal",
        "threadgroup T tile_memory[",
        "threadgroup Place places[2]; threadgroup T tile_memory[",
        None,
    ),
    "a pointer into another space, of a pool": (
        "states.metal",
        "return (device uchar*)const_cast<device P*>(key_pool)",
        "return (threadgroup uchar*)const_cast<device P*>(key_pool)",
        None,
    ),
    "a state written through a constant": (
        "convolution.metal",
        "inline device S* state_of(",
        "inline const device S* state_of(",
        "j, channel, given.channels, key_pool, value_pool, num_blocks, block) =",
    ),
    "a row taken for threadgroup memory": (
        "recurrence.metal",
        "const device T* run = row + run_start",
        "const threadgroup T* run = row + run_start",
        None,
    ),
    "an array of variable length": (
        "kv_blocks.metal",
        "T run[RUN];",
        "T run[head];",
        None,
    ),
}
DRIVE = {
    "decode.metal": lambda: attend(STEPS["decode"], SHAPE),
    "prefill.metal": lambda: attend(STEPS["prefill"], AttentionShape(4, 2, 192, 192)),
    "reduce.metal": lambda: attend(STEPS["decode in parts"], SHAPE),
    "attention.metal": lambda: attend(STEPS["decode"], SHAPE),
    "numeric.metal": lambda: write(F16, FP8),
    "kv_write.metal": lambda: write(F16, FP8),
    "kv_gather.metal": lambda: gather(F16, FP8),
    "kv_blocks.metal": lambda: move(F16),
    "read_states.metal": lambda: move(F16),
    "write_states.metal": lambda: move(F16),
    "states.metal": lambda: recur(F16),
    "convolution.metal": lambda: convolve(F16),
    "recurrence.metal": lambda: recur(F16),
}


#: One of each kind of finding of clang and of the checks of its output; CI runs the others.
BY_DAY = (
    "a pointer without its address space",
    "a reference of another space",
    "threadgroup memory taken for device memory",
    "a cast that loses the space",
    "a write to an input",
    "a threadgroup variable with a constructor",
    "an array of variable length",
)


@pytest.mark.parametrize(
    "mistake",
    [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.more) for name in MISTAKES],
)
def test_planted_mistakes_are_refused_at_their_line(mistake):
    file, old, new, named = MISTAKES[mistake]
    lines = METAL[file].read_text().split("\n")
    assert sum(old in line for line in lines) == 1
    (number,) = (n for n, line in enumerate(lines, 1) if (named or old) in line)

    def planted(header, source, **rest):
        header, source = header.replace(old, new), source.replace(old, new)
        return Strict().metal_kernel(header=header, source=source, **rest)

    with kernel.using(planted), pytest.raises(CompileError, match=rf"{file}:{number}:\d+: error"):
        DRIVE[file]()


def compile_probe(source, header="", template=(), inputs=None):
    inputs = [mx.zeros(64)] if inputs is None else inputs
    made = Strict().metal_kernel(
        name="probe",
        input_names=[f"in{i}" for i in range(len(inputs))],
        output_names=["out"],
        source=source,
        header=header,
    )
    (out,) = made(
        inputs=inputs,
        template=template,
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(8,)],
        output_dtypes=[mx.float32],
    )
    return out


def test_outputs_are_zeros():
    assert np.array(compile_probe("out[0] = in0[0];")).tolist() == [0.0] * 8


@pytest.mark.parametrize(
    "dtype",
    [BF16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (F16, F32, INT8))],
    ids=str,
)
def test_vectors_are_loaded_from_and_stored_to_any_space(dtype):
    source = """
        threadgroup vec<T, 4> fours[4];
        threadgroup T ones[16];
        threadgroup T* first = ones;
        const device vec<T, 4>* from = (const device vec<T, 4>*)in0;
        fours[0] = from[1];
        *(threadgroup vec<T, 2>*)first = fours[0].xy;
        vec<T, 4> mine = vec<T, 4>(ones[0], fours[0].yz, in0[3]) + from[0] * vec<T, 4>(in0[1]);
        float4 wide = float4(mine[0], float3(1.0f, 2.0f, float(mine.w)));
        wide = metal::max(wide, float4(fours[0])) * 2.0f;
        wide.xy = clamp(wide.zw, 0.0f, 1.0f);
        thread float (&part)[2] = *(thread float (*)[2])&wide;
        *(device float4*)(out + 4) = select(wide, float4(part[1]), wide < float4(0.5f));
        out[0] = dot(wide.xyz, float3(0.0f)) + metal::precise::exp2(wide.x);
    """
    compile_probe(source, template=[("T", dtype)], inputs=(mx.zeros(64).astype(dtype),))


def test_simdgroup_functions_matrices_and_atomics_take_the_spaces_they_take_in_metal():
    source = """
        threadgroup float tile[64];
        threadgroup atomic_uint count;
        simdgroup_float8x8 a, b(1.0f), c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        simdgroup_load(a, in0, 8);
        simdgroup_load(b, tile, 8, ulong2(0), true);
        simdgroup_multiply_accumulate(c, a, b, c);
        c.thread_elements()[0] = simd_sum(c.thread_elements()[1]);
        simdgroup_store(c, tile);
        simdgroup_store(c, out, 8);
        if (simd_is_first()) atomic_fetch_add_explicit(&count, 1, memory_order_relaxed);
        atomic_store_explicit((device atomic_float*)out, in1, memory_order_relaxed);
        float whole;
        tile[1] = modf(simd_shuffle_xor(tile[0], 1), whole);
    """
    compile_probe(source, inputs=(mx.zeros(64), 2.0))
    with pytest.raises(CompileError, match="probe:1:"):
        compile_probe("simdgroup_float8x8 a; simdgroup_store(a, in0);")
    with pytest.raises(CompileError, match="probe:1:"):
        compile_probe("threadgroup float whole; modf(1.5f, whole);")


def test_a_cast_in_code_of_one_instantiation_only():
    header = '#line 1 "probe.metal"\n' + (
        "template <bool B>\nfloat f(const device float* p) {\n"
        "  if (B) return *(const threadgroup float*)p;\n  return *p;\n}\n"
    )
    compile_probe("out[0] = f<B>(in0);", header, [("B", False)])
    with pytest.raises(CompileError, match=r"probe\.metal:3:\d+: .*device.*threadgroup"):
        compile_probe("out[0] = f<B>(in0);", header, [("B", True)])
