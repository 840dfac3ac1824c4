# SPDX-License-Identifier: Apache-2.0
"""Warm-up compiles everything that any step needs."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import valuewise

from metal_kernels import kernel
from metal_kernels.kv_write import RotationKind
from metal_kernels.paged_attention import Tiles
from tests.engine.models.recurrent import FAMILIES, make_model
from tests.metal_kernels.doubles import Recorder
from vllm_metal.engine.attention import sparse
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.attention.layers import AttentionLayer, attention_layers
from vllm_metal.engine.attention.paged_cache import LayerRotation
from vllm_metal.engine.kv_cache.gathered import ByMLX
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.latent_prompts import LatentHeads
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import block_size_for, host_of_states
from vllm_metal.engine.kv_cache.warm_up import compile_kernels
from vllm_metal.patches.mlx_patches import rotations
from vllm_metal.patches.mlx_patches.seam import BlockChoice, GroupChoice, Scoring

BLOCK_SIZE, NUM_BLOCKS = 16, 70
MOST = NUM_BLOCKS * BLOCK_SIZE - 300  # positions before a step's rows
shapes = st.builds(
    lambda group, heads, size: (group * heads, heads, size),
    st.sampled_from([1, 3, 4, 8]),
    st.sampled_from([1, 8]),
    st.sampled_from([64, 128, 192, 512]),
) | st.sampled_from([(71, 1, 64), (64, 64, 64), (65, 65, 64)])
windows = st.sampled_from([None, 40, 192, 253, 512])
variants = st.sampled_from([{}, {"softcap": 30.0}, {"extent": 20}])
kinds = st.tuples(shapes, windows, st.sampled_from([None, mx.float16]), variants)
request = st.tuples(st.integers(0, MOST), st.integers(1, 9) | st.integers(1, 100))


def layout(requests):
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = counts + np.array([before for before, _ in requests], np.int32)
    tables = np.tile(np.arange(NUM_BLOCKS, dtype=np.int32), (len(requests), 1))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    slots = np.arange(starts[-1], dtype=np.int32)
    return StepLayout(starts, seq_lens, tables, slots, BLOCK_SIZE)


def serve(backend, layer, dtype, pool_dtype, steps):
    shape = layer.shape
    kv_cache = backend.allocate(NUM_BLOCKS, BLOCK_SIZE, layer.storage_key, pool_dtype)
    kv_cache.copy_blocks(np.array([3]), np.array([4]))
    kv_cache.clear_blocks(np.array([5, 6]))
    for requests in steps:
        plan = backend.plan(layout(requests), layer.kind)
        keys, values = (
            mx.zeros((plan.num_tokens, shape.num_kv_heads, size), dtype)
            for size in (shape.head_size, shape.value_size)
        )
        queries = mx.zeros((plan.num_tokens, shape.num_heads, shape.head_size), dtype)
        sinks = None if layer.sinks is None else mx.zeros(shape.num_heads, layer.sinks)
        kv_cache.write(plan, keys, values)
        bias = None
        if layer.extent is not None:
            bias = mx.zeros((*queries.shape[:2], layer.extent), dtype)
        kv_cache.attend(plan, queries, Scoring(1.0, sinks, layer.softcap, bias))


@settings(max_examples=15)
@given(
    layers=st.lists(kinds, min_size=1, max_size=3),
    pool_dtype=st.sampled_from([mx.float16, mx.uint8]),
    steps=st.lists(st.lists(request, min_size=1, max_size=6), min_size=1, max_size=6),
    fewer=st.booleans(),
    drawn=st.data(),
)
def test_no_step_asks_for_what_was_not_compiled(layers, pool_dtype, steps, fewer, drawn):
    layers = [
        AttentionLayer(
            f"layers.{index}",
            *shape,
            window,
            sinks,
            value_size=128 if shape[2] == 192 else None,
            **variant,
        )
        for index, (shape, window, sinks, variant) in enumerate(layers)
    ]
    backend = KERNELS
    if fewer:  # some failed their self-check
        tiles = {}
        for kind in {layer.kind for layer in layers}:
            sizes = Tiles.for_layer(kind.shape, kind.window)
            kept = drawn.draw(st.sets(st.sampled_from([*sizes.decode, *sizes.prefill]), min_size=1))
            tiles[kind] = Tiles(
                tuple(rows for rows in sizes.decode if rows in kept),
                tuple(rows for rows in sizes.prefill if rows in kept),
                drawn.draw(st.booleans()) and sizes.split,
            )
        backend = KernelBackend(tiles=tiles)
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(backend, layers, mx.float16, pool_dtype, BLOCK_SIZE)
        compiled = set(recorder.pipelines)
        for layer in layers:
            serve(backend, layer, mx.float16, pool_dtype, steps)
    assert recorder.pipelines - compiled == set()
    assert {"kv_write", "kv_blocks"} <= {pipeline.kernel for pipeline in compiled}
    assert recorder.threads.pop("decode", 0) <= 512
    assert max(recorder.threads.values()) <= 256


@valuewise(
    by_mlx=[ByMLX(prompts={1: 64}), ByMLX(True, {1024: None, 8192: 200})],
    window=[None, 40],
    pool_dtype=[mx.float16, mx.int8],
    softcap=[None, 30.0],
)
def test_contexts_of_prompts_by_mlx_are_gathered_before_any_comes(
    by_mlx, window, pool_dtype, softcap
):
    """By one pipeline for each size of head, and none more."""
    layer = AttentionLayer("layers.0", 4, 2, 96, window, mx.float16, value_size=64, softcap=softcap)
    backend = KernelBackend(by_mlx={layer.kind: by_mlx})
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(backend, [layer], mx.float16, pool_dtype, BLOCK_SIZE)
        compiled = set(recorder.pipelines)
        serve(backend, layer, mx.float16, pool_dtype, [[(0, 70), (700, 300), (3, 1)]])
    assert recorder.pipelines - compiled == set()
    gathers = [pipeline for pipeline in compiled if pipeline.kernel == "kv_gather"]
    assert len(gathers) == 2  # K of 96, V of 64


@pytest.mark.parametrize("pool_dtype", [mx.float16, mx.int8], ids=str)
def test_contexts_of_latents_are_gathered_once_before_any_prompt(pool_dtype):
    heads = LatentHeads(2, rank=512, rotated=64, key=32, value=32)
    layer = AttentionLayer("layers.0", 2, 1, 576, None, value_size=512, latent=True, heads=heads)
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(KERNELS, [layer], mx.float16, pool_dtype, BLOCK_SIZE)
        compiled = set(recorder.pipelines)
        state = layer.allocate(NUM_BLOCKS, BLOCK_SIZE, pool_dtype, KERNELS)
        plan = layer.scope(state).plan_of(layout([(300, 50), (3, 60), (7, 1)]))
        fresh = mx.zeros((111, 1, 576), mx.float16)
        state.write(plan, fresh, fresh)
        state.attend(plan, mx.zeros((1, 2, 576), mx.float16), Scoring(1.0))
        assert len(state.contexts(plan, plan.prompts)) == 2
    assert recorder.pipelines - compiled == set()
    assert "kv_gather" in {pipeline.kernel for pipeline in compiled}


OF_LATENTS = AttentionLayer("layers.0", 2, 1, 576, None, value_size=512, latent=True, topk=64)
#: Without RoPE.
OF_GROUPS = AttentionLayer("layers.0", 2, 1, 512, None, latent=True, topk=64)
OF_HEADS = AttentionLayer("layers.0", 8, 2, 192, None, topk=64, choices=2)


@pytest.mark.parametrize("pool_dtype", [mx.float16, mx.uint8], ids=str)
@pytest.mark.parametrize(
    ("layer", "choice"),
    [
        (OF_LATENTS, 64),
        (OF_GROUPS, GroupChoice(5, 12, lambda rows: rows.sum(axis=2)[..., :64])),
        (OF_HEADS, BlockChoice(16, 4, 1)),
    ],
    ids=["latents", "groups of latents", "blocks of K/V"],
)
def test_sparse_attention_gathers_by_pipelines_that_are_there(layer, choice, pool_dtype):
    query_size = 64 if isinstance(choice, GroupChoice) else 128
    index = IndexLayer.of("layers.0.1", 2, 128, choice, query_size)
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(KERNELS, [layer, index], mx.float16, pool_dtype, BLOCK_SIZE)
        compiled = set(recorder.pipelines)
        states, plans = [], []
        for each in (layer, index):
            states.append(each.allocate(NUM_BLOCKS, BLOCK_SIZE, pool_dtype, KERNELS))
            plans.append(each.scope(states[-1]).plan_of(layout([(300, 9), (3, 2), (70, 1)])))
            rows = mx.zeros((12, each.num_kv_heads, each.head_size), mx.float16)
            states[-1].write(plans[-1], rows, rows)
        weights = mx.zeros((12, 2)) if layer.latent else None
        given = mx.zeros((12, 2, query_size), mx.float16), weights, mx.zeros(12, mx.int32)
        chosen = sparse.choose(states[1], plans[1], plans[1].sparse, *given, choice)
        read_slots = plans[0].sparse.read_slots_of(chosen)
        assert read_slots.shape == (10, layer.choices, 64)
        queries = mx.zeros((10, layer.num_heads, layer.head_size), mx.float16)
        mx.eval(sparse.attend(states[0], plans[0], queries, read_slots, Scoring(1.0), None))
    assert recorder.pipelines - compiled == set()
    assert sum(pipeline.kernel == "kv_gather" for pipeline in compiled) == 2


def test_nothing_is_compiled_that_no_step_asks_for():
    """Of a common kind of layer, by steps that fill every tile."""
    layer = AttentionLayer("layers.0", 8, 2, 128, None)
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(KERNELS, [layer], mx.float16, mx.float16, BLOCK_SIZE)
        compiled, recorder.pipelines = recorder.pipelines, set()
        queries = (2, 4, 8, 16)  # packed rows 8 to 64, the sizes of tiles
        steps = [[(before, rows)] for before in (0, MOST) for rows in queries]
        steps.append([(0, 2)] * 40)  # more tiles than go by 512 threads
        serve(KERNELS, layer, mx.float16, mx.float16, steps)
    assert recorder.pipelines == compiled
    assert len(compiled) == 2 * len(queries) + 5  # in 512 threads; reduce, write, copy and clear


@pytest.mark.parametrize(
    ("layer", "queries"),
    [
        (AttentionLayer("layers.0", 8, 2, 128, None), True),
        (AttentionLayer("layers.0", 4, 1, 576, None, value_size=512, latent=True), False),
    ],
    ids=["heads", "latents"],
)
def test_a_layer_compiles_one_write_with_its_rotation_or_without(layer, queries):
    """Before any step; so as many pipelines as without rotations. Another kind has its own."""
    kinds = [RotationKind(64), RotationKind(64, listed=True)]
    rotating = [replace(layer, rotation=LayerRotation(kind, queries)) for kind in kinds]
    found = []
    for layers in ([layer], rotating[:1], rotating):
        recorder = Recorder()
        with kernel.using(recorder.metal_kernel):
            compile_kernels(KERNELS, layers, mx.float16, mx.float16, BLOCK_SIZE)
            found.append(set(recorder.pipelines))
            for each in layers[: len(layers) if layers[0].rotation else 0]:
                rotate(each, [1, 7, 8, 40])
        assert recorder.pipelines == found[-1]
    writes = [{p for p in pipelines if p.kernel == "kv_write"} for pipelines in found]
    assert [len(pipelines) for pipelines in writes] == [1, 1, 2]
    assert len(found[0]) == len(found[1]) == len(found[2]) - 1


def rotate(layer, counts):
    """Writes of so many rows, as the layer's cache has them."""
    kv_cache = layer.allocate(NUM_BLOCKS, BLOCK_SIZE, mx.float16, KERNELS)
    for count in counts:
        scope = layer.scope(kv_cache)
        plan = scope.plan_of(layout([(0, count)]))
        positions = mx.arange(count)
        listed = layer.rotation.kind.listed
        of = {"freqs": mx.ones(32), "base": None} if listed else {"base": 5e5}
        with scope.during(positions, plan), rotations.noted():
            cache = layer.cache(kv_cache, scope)
            rows = mx.zeros((count, layer.num_kv_heads, 1, 64 if layer.latent else 128), mx.float16)
            rope = partial(mx.fast.rope, dims=64, traditional=False, scale=1.0, offset=positions)
            if not layer.latent:
                rope(mx.zeros((count, layer.num_heads, 1, 128), mx.float16), **of)
            turned = rope(rows, **of)
            latent = mx.zeros((count, 1, 1, 512), mx.float16)
            cache.update_and_fetch(*((latent, turned) if layer.latent else (turned, rows)))


BF16 = mx.bfloat16
LATENT_HEADS = LatentHeads(128, rank=512, rotated=64, key=128, value=128)
#: Layers of served models, and how many pipelines were compiled for them, over pools of 16 bits,
#: before one kernel decoded for all head sizes. Codes take two more, which move blocks of scales.
SERVED = {
    "llama 8B": ([(32, 8, 128, None)], 14),
    "qwen3_5": ([(16, 2, 256, None)], 10),
    "gpt-oss": ([(64, 8, 64, 128, BF16), (64, 8, 64, None, BF16)], 12),
    # Latents were left to `prefill`. Now `decode` serves few rows, in parts and not, and prompts
    # are gathered: LATENTS_SINCE more.
    "deepseek_v3": ([(128, 1, 576, None)], 6),
    "gemma 4 31B": ([(32, 16, 256, 1024), (32, 4, 512, None)], 22),
    "gemma 4 E4B": ([(8, 2, 256, 512), (8, 2, 512, None)], 20),
}
LATENTS_SINCE = 3
#: Heads of 80 to 256 elements, whose short contexts go by 512 threads where they are few.
WIDE_SINCE = 1


@valuewise(model=list(SERVED), pool_dtype=[BF16, mx.uint8])
def test_no_more_is_compiled_than_when_decode_and_prefill_shared_the_sizes(model, pool_dtype):
    kinds, most = SERVED[model]
    latent = {"value_size": 512, "latent": True, "heads": LATENT_HEADS}
    layers = [
        AttentionLayer("layers.0", *kind, **latent if kind[2] == 576 else {}) for kind in kinds
    ]
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(KERNELS, layers, BF16, pool_dtype, BLOCK_SIZE)
    most += 2 * (pool_dtype == mx.uint8) + LATENTS_SINCE * (model == "deepseek_v3")
    most += WIDE_SINCE * any(64 < kind[2] <= 256 for kind in kinds)
    assert len(recorder.pipelines) <= most


def test_it_says_how_far_it_is(capsys: pytest.CaptureFixture[str]):
    layer = AttentionLayer("layers.0", 8, 2, 128, None)
    with kernel.using(Recorder().metal_kernel):
        compile_kernels(KERNELS, [layer], mx.float16, mx.float16, BLOCK_SIZE)
    assert "Compiling Metal kernels: 100%" in (said := capsys.readouterr().err)
    assert "9/9" in said  # four sizes of tiles, in parts and not, and one in 512 threads


def test_a_region_without_kernels_has_nothing_to_compile(capsys: pytest.CaptureFixture[str]):
    layer = AttentionLayer("layers.0", 8, 2, 128, None)
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(SCATTER, [layer], mx.float16, mx.float16, BLOCK_SIZE)
    assert not recorder.pipelines and not capsys.readouterr().err


def test_parts_of_one_row_and_head_launch_what_parts_of_many_do():
    """Though their statistics are too few for a buffer by themselves."""
    layer = AttentionLayer("layers.0", 1, 1, 64, None, None)
    tiles = {layer.kind: Tiles((8,), (), True)}
    backend = KernelBackend(tiles=tiles)
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(backend, [layer], mx.float16, mx.float16, BLOCK_SIZE)
        compiled = set(recorder.pipelines)
        for rows in (1, 9):
            serve(backend, layer, mx.float16, mx.float16, [[(248, rows)]])
    assert recorder.pipelines - compiled == set()


HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
HYBRIDS = {
    name: replace(FAMILIES[name], config=FAMILIES[name].config | changes)
    for name, changes in {
        "qwen3_next": HEADS,
        "mamba2": {},
        "lfm2": HEADS,
        "jamba": HEADS,
    }.items()
}


def serve_states(model, layers, backend, dtype, pool_dtype, block_size):
    """Prompts, decodes and drafts of which some are accepted, through the model's own modules."""
    host = host_of_states(layers, block_size, pool_dtype)
    size = NUM_BLOCKS, block_size, pool_dtype, backend
    tables = np.arange(1, 41, dtype=np.int32).reshape(2, 20)
    for layer, module_of in zip(layers, model.layers, strict=True):
        if not layer.state_bytes:
            continue
        state = layer.allocate(*size) if host is None else layer.share(host.allocate(*size).storage)
        scope = layer.scope(state)
        for begins, counts, drafts in (
            ([0, 0], [40, 3], [0, 0]),
            ([40, 3], [4, 1], [3, 0]),
            ([42, 4], [3, 5], [2, 4]),
            ([43, 9], [1, 1], [0, 0]),
        ):
            starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
            lens = np.array(begins, np.int32) + np.array(counts, np.int32)
            layout = StepLayout(
                *(starts, lens, tables, np.arange(starts[-1], dtype=np.int32), block_size),
                req_indices_np=np.arange(2, dtype=np.int32),
                num_drafts_np=np.array(drafts, np.int32),
            )
            state.begin_step()
            x = mx.zeros((int(starts[-1]), 1, model.args.hidden_size), dtype)
            with scope.during(mx.arange(int(starts[-1])), scope.plan_of(layout)):
                module_of(x, mask=None, cache=layer.cache(state, scope))
        state.begin_step()


# By day one of each with long prompts apart: states that MLX computes in chunks, and others.
@valuewise(
    name=["qwen3_next", "mamba2", "lfm2", "jamba"],
    ways=[(True, 40), (True, None), (False, None)],
    pool_dtype=[mx.bfloat16, mx.int8],
)
def test_no_step_of_a_recurrent_layer_asks_for_what_was_not_compiled(name, ways, pool_dtype):
    by_kernels, long_prompt = ways
    model = make_model(HYBRIDS[name])
    model.set_dtype(mx.bfloat16)
    layers = attention_layers(model, name)
    block_size = block_size_for(layers, BLOCK_SIZE, pool_dtype)
    backend = KernelBackend(computes_states=by_kernels, long_prompt=long_prompt)
    recorder = Recorder()
    with kernel.using(recorder.metal_kernel):
        compile_kernels(backend, layers, mx.bfloat16, pool_dtype, block_size)
        compiled, recorder.pipelines = set(recorder.pipelines), set()
        serve_states(model, layers, backend, mx.bfloat16, pool_dtype, block_size)
    assert recorder.pipelines and recorder.pipelines <= compiled
    launched = {pipeline.kernel for pipeline in recorder.pipelines}
    ours = {"convolution"} if name == "lfm2" else {"convolution", "recurrence"}
    moves = {"read_states", "write_states"}
    in_chunks = long_prompt is not None and name == "qwen3_next"
    assert launched == (moves if not by_kernels else ours | (moves if in_chunks else set()))
    attending = {"kv_write", "kv_blocks", "decode", "prefill", "reduce"}
    if long_prompt is None:
        assert {pipeline.kernel for pipeline in compiled} - attending == launched
