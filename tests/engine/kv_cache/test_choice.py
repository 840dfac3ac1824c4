# SPDX-License-Identifier: Apache-2.0
"""Backend choice by the self-check's results per kernel and tile."""

import sys
from collections.abc import Callable
from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import kernel
from metal_kernels.kv_write import RotationKind
from metal_kernels.paged_attention import AttentionShape, Splits, Tiles
from metal_kernels.paged_attention.buckets import MAX_SCORES
from metal_kernels.selfcheck import CHOICES, Case, Check, Outcome, StateKind, checks, timing
from tests.metal_kernels.doubles import Refusing
from tests.metal_kernels.selfchecks import check, in_use
from vllm_metal.device import selfcheck, tuned
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.attention.layers import AttentionLayer, RunLayer, SequenceLayer
from vllm_metal.engine.attention.paged_cache import LayerRotation
from vllm_metal.engine.attention.recurrent_ops import Convolution, Recurrence, RecurrentOps
from vllm_metal.engine.kv_cache import choice
from vllm_metal.engine.kv_cache.gathered import ByMLX
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.latent_prompts import LatentHeads
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVBackend, KVShape, LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.stateful_layer import StepBounds
from vllm_metal.engine.recurrent.recurrent_state import StateFormat
from vllm_metal.patches.mlx_patches.seam import Scoring
from vllm_metal.settings import extras

LAYERS = [
    AttentionLayer("layers.0", 8, 2, 128, None),
    AttentionLayer("layers.1", 8, 2, 128, 512),
    AttentionLayer("layers.2", 8, 2, 128, None),
]
HEADS = LatentHeads(4, rank=512, rotated=64, key=32, value=32)
LATENTS = AttentionLayer("layers.0", 4, 1, 576, None, value_size=512, latent=True, heads=HEADS)
UNFUSED = (replace(LAYERS[0], softcap=30.0), LATENTS)  # by MLX, on any GPU
SHAPE = LAYERS[0].shape
REASON = "ValueError: Thread group size (512) is greater than  the maximum"


@pytest.fixture(autouse=True)
def as_on_a_mac(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_METAL_KERNELS", raising=False)
    with kernel.using(mx.fast.metal_kernel):
        yield


def with_more(names, *by_day):
    """Marks all but the daily cases for CI's second step."""
    return [
        name if name in by_day else pytest.param(name, marks=pytest.mark.more) for name in names
    ]


def kv_backend(layers=LAYERS, dtype=mx.bfloat16) -> KVBackend:
    return choice.kv_backend("metal", layers, dtype, dtype, 16)


def found_where(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Case, Check], bool]) -> None:
    """Makes the self-check fail the checks for which `fails` is true."""

    def results(cases, tell=None):
        return [
            Outcome(one.kernel, case, not bad, REASON if bad else "", rows=one.rows, wide=one.wide)
            for case in cases
            for one in checks(case)
            for bad in [fails(case, one)]
        ]

    monkeypatch.setattr(selfcheck, "results", results)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(choice.logger, "warning", lambda text, *values: said.append(text % values))
    return said


def test_a_models_layers_make_a_case_of_each_kind():
    for pool_dtype in (mx.bfloat16, mx.uint8):
        cases = choice.needed_cases(LAYERS, mx.bfloat16, pool_dtype, 16)
        assert [case.window for case in cases] == [None, 512]
        kinds = {(case.dtype, case.cache_dtype) for case in cases}
        assert kinds == {(mx.bfloat16, pool_dtype)}


def test_a_server_checks_all_that_it_launches():
    case, _ = choice.needed_cases(LAYERS, mx.bfloat16, mx.bfloat16, 16)
    attending = ["decode", "prefill", "reduce", "graph", "gathered", "decode_way", "prefill_way"]
    assert in_use(case) == ["kv_write", "kv_gather", "kv_blocks", *attending]
    for other in UNFUSED:
        (case,) = choice.needed_cases([other], mx.bfloat16, mx.bfloat16, 16)
        assert {"gathered", "prefill_way"} <= set(in_use(case))


@pytest.mark.parametrize("layer", UNFUSED, ids=["a cap", "latents"])
def test_prompts_that_mlx_has_nothing_fused_for_go_by_plain_operations(monkeypatch, layer):
    """They were faster there, and for few rows at once, whatever the tuner found for others."""
    times_are(monkeypatch, {("prefill_way", None): 0.5})
    (case,) = choice.needed_cases([layer], BF16, BF16, 16)
    kept = tuned.Loaded(tuned.Choices(force_fused={str(case): True}))
    chosen = choice.kv_backend("metal", [layer], BF16, BF16, 16, tuned=kept)
    assert chosen.by_mlx == {layer.kind: ByMLX(False, {1: 64}, False)}
    where = StepLayout(
        np.array([0, 200], np.int32),
        np.array([30000], np.int32),
        np.zeros((1, 2048), np.int32),
        np.zeros(200, np.int32),
        16,
    )
    (prompt,) = chosen.plan(where, layer.kind).gathered.prompts.prompts
    assert max(piece.num_rows * piece.end for piece in prompt.pieces) <= MAX_SCORES


def test_kernels_that_all_pass_serve_as_they_are(monkeypatch, warned):
    found_where(monkeypatch, lambda case, one: False)
    assert kv_backend() == KERNELS
    assert not warned


def test_layers_that_rotate_have_that_checked_and_do_without_it(monkeypatch, warned):
    rotation = LayerRotation(RotationKind(128), queries=True)
    latent = LayerRotation(RotationKind(64, 0, True), queries=False)
    layers = [replace(LAYERS[0], rotation=rotation), replace(LATENTS, rotation=latent)]
    cases = choice.needed_cases(layers, BF16, BF16, 16)
    kinds = [case.rotation for case in cases if "rotation" in case.kernels]
    assert kinds == [RotationKind(128), RotationKind(64, 512, True)]
    found_where(monkeypatch, lambda case, one: False)
    assert kv_backend(layers) == KERNELS
    found_where(monkeypatch, lambda case, one: one.kernel == "rotation")
    chosen = kv_backend(layers)
    assert isinstance(chosen, KernelBackend) and not chosen.rotates
    (line,) = warned
    assert "rotation" in line and REASON in line


@pytest.mark.parametrize("failed", ["kv_write", "decode and prefill"])
@pytest.mark.parametrize("window", [None, 512])
def test_without_a_write_or_any_attention_mlx_serves(monkeypatch, warned, failed, window):
    found_where(monkeypatch, lambda case, one: case.window == window and one.kernel in failed)
    assert kv_backend() is SCATTER
    (line,) = warned
    assert "instead of Metal kernels" in line and REASON in line and "vllm-metal doctor" in line
    monkeypatch.setenv("VLLM_METAL_KERNELS", "metal")
    with pytest.raises(ValueError, match=r"self-check.*vllm-metal doctor"):
        kv_backend()


def test_an_interpreter_that_is_not_installed_is_said_to_be_missing(monkeypatch):
    monkeypatch.setenv("VLLM_METAL_KERNELS", "interpret")
    monkeypatch.setitem(sys.modules, "metal_interpreter", None)  # as if there were none
    with pytest.raises(
        ValueError,
        match=r"=interpret: the package metal_interpreter is not installed; run: .*inter",
    ):
        choice.kv_backend("cpu", LAYERS, mx.float32, mx.float32, 16)


def test_contexts_are_cut_as_the_machine_and_the_user_have_it(monkeypatch):
    asked = []
    found_where(monkeypatch, lambda case, one: False)
    results = selfcheck.results
    monkeypatch.setattr(
        selfcheck, "results", lambda cases, tell: asked.extend(cases) or results(cases)
    )
    splits = Splits(slots=30, fixed=512)
    chosen = choice.kv_backend("metal", LAYERS, BF16, BF16, 16, splits)
    assert isinstance(chosen, KernelBackend) and chosen.splits == splits
    # Which rows MLX's attention serves would depend on those beside them.
    assert not {name for case in asked for name in case.kernels} & set(CHOICES)
    starts, lens = np.array([0, 1], np.int32), np.array([2000], np.int32)
    where = StepLayout(starts, lens, np.zeros((1, 125), np.int32), np.zeros(1, np.int32), 16)
    (dispatch,) = chosen.plan(where, AttentionKind(SHAPE, None)).attention.dispatches
    assert dispatch.num_splits == 4
    found_where(monkeypatch, lambda case, one: one.kernel == "kv_write")
    with pytest.raises(ValueError, match=r"fixed_splits needs the Metal kernels: .*self-check"):
        choice.kv_backend("metal", LAYERS, BF16, BF16, 16, splits)


def test_plans_obey_the_tuners_file(monkeypatch, tmp_path):
    """A start reads tiles and shared prefixes by kind of layer, and splits for all."""
    case, windowed = choice.needed_cases(LAYERS, BF16, BF16, 16)
    kept = tuned.Choices(
        part_cost=500,
        slots=2000,
        decode_rows={str(case): 8, str(windowed): 4},
        shared={str(case): 50_000, "another": 1},
    )
    tuned.save(kept, folder=tmp_path)
    read = tuned.load(tmp_path)
    found_where(monkeypatch, lambda case, one: False)
    chosen = choice.kv_backend("metal", LAYERS, BF16, BF16, 16, Splits(slots=30), read)
    assert chosen.splits == Splits(part_cost=500, slots=2000)
    assert chosen.tiles[AttentionKind(SHAPE, None)].decode == (8,)
    assert (
        chosen.tiles[AttentionKind(SHAPE, 512)].decode == WHOLE.decode
    )  # of none, all that are right
    starts, lens = np.array([0, 4], np.int32), np.array([4000], np.int32)
    where = StepLayout(starts, lens, np.zeros((1, 250), np.int32), np.zeros(4, np.int32), 16)
    by_default = choice.kv_backend("metal", LAYERS, BF16, BF16, 16)
    for serves, decode, rows in ((chosen, False, 64), (by_default, True, 16)):
        (dispatch,) = serves.plan(where, AttentionKind(SHAPE, None)).attention.dispatches
        assert (dispatch.decode, dispatch.rows) == (decode, rows)
    assert (
        chosen.tiles[AttentionKind(SHAPE, None)].shared,
        chosen.tiles[AttentionKind(SHAPE, 512)].shared,
    ) == (
        50_000,
        WHOLE.shared,
    )
    starts, lens = np.arange(9, dtype=np.int32), np.full(8, 4000, np.int32)
    where = StepLayout(starts, lens, np.zeros((8, 250), np.int32), np.zeros(8, np.int32), 16)
    for serves in (chosen, by_default):  # seven of eight need not read some 4000 keys
        (dispatch,) = serves.plan(where, AttentionKind(SHAPE, None)).attention.dispatches
        assert (dispatch.shared is None) == (serves is chosen)
    fixed = Splits(fixed=512)
    chosen = choice.kv_backend("metal", LAYERS, BF16, BF16, 16, fixed, read)
    assert chosen.splits.fixed == 512


@pytest.mark.parametrize("failed", ["nothing", "kv_write"])
def test_a_file_that_cannot_be_used_costs_one_line(monkeypatch, warned, failed):
    found_where(monkeypatch, lambda case, one: one.kernel == failed)
    loaded = tuned.Loaded(tuned.Choices(), "it is broken")
    choice.kv_backend("metal", LAYERS, BF16, BF16, 16, tuned=loaded)
    assert warned.count("it is broken") == 1


def test_a_tile_that_is_wrong_here_does_not_serve_because_it_was_quick(monkeypatch):
    case, _ = choice.needed_cases(LAYERS, BF16, BF16, 16)
    quick = tuned.Loaded(tuned.Choices(decode_rows={str(case): WHOLE.decode[0]}))
    wrong = Check("decode", WHOLE.decode[0])
    found_where(monkeypatch, lambda case, one: one == wrong)
    chosen = choice.kv_backend("metal", LAYERS, BF16, BF16, 16, tuned=quick)
    assert chosen.tiles[AttentionKind(SHAPE, None)].decode == WHOLE.decode[1:]


def test_what_was_not_checked_is_not_used(monkeypatch):
    monkeypatch.setattr(selfcheck, "results", lambda cases, tell: [])
    assert kv_backend() is SCATTER


WHOLE = Tiles.for_layer(SHAPE)
FALLBACKS = {  # what fails: tiles that are left, whether blocks are moved, and graphs repeated
    "one tile": (Check("prefill", 64), replace(WHOLE, prefill=WHOLE.prefill[:-1]), True, True),
    "512 threads": (Check("decode", 8, True), replace(WHOLE, wide=False), True, True),
    "decode": (Check("decode"), Tiles((), WHOLE.prefill, True), True, True),
    "prefill": (Check("prefill"), replace(WHOLE, prefill=()), True, True),
    "reduce": (Check("reduce"), replace(WHOLE, split=False), True, True),
    "kv_blocks": (Check("kv_blocks"), WHOLE, False, True),
    "graph": (Check("graph"), WHOLE, True, False),
}


@pytest.mark.parametrize("name", with_more(FALLBACKS, "one tile", "reduce"))
def test_what_fails_costs_itself_only(monkeypatch, warned, name):
    failing, tiles, moves_blocks, repeatable = FALLBACKS[name]

    def fails(case: Case, one: Check) -> bool:
        size = failing.rows in (None, one.rows) and failing.wide in (False, one.wide)
        return one.kernel == failing.kernel and size

    found_where(monkeypatch, fails)
    chosen = kv_backend()
    assert isinstance(chosen, KernelBackend)
    kinds = AttentionKind(SHAPE, None), AttentionKind(SHAPE, 512)
    assert chosen.tiles == ({} if tiles == WHOLE else dict.fromkeys(kinds, tiles))
    assert (chosen.moves_blocks, chosen.repeatable) == (moves_blocks, repeatable)
    (line,) = warned
    assert failing.kernel in line and REASON in line and "vllm-metal doctor" in line
    with kernel.using(metal_interpreter.metal_kernel):
        assert_right(chosen, SHAPE)
    monkeypatch.setenv("VLLM_METAL_KERNELS", "metal")
    assert isinstance(kv_backend(), KernelBackend)


SPARSE = [replace(LATENTS, topk=64), IndexLayer.of("layers.0.1", 8, 128, 64)]


def test_keys_of_an_indexer_are_written_and_gathered_only():
    latents, keys = choice.needed_cases(SPARSE, mx.bfloat16, mx.int8, 16)
    assert "decode" in in_use(latents)
    assert in_use(keys) == ["kv_write", "kv_gather", "kv_blocks"]


@pytest.mark.parametrize("failing", ["kv_gather", "gathered"])
def test_sparse_attention_needs_gathers(monkeypatch, warned, failing):
    found_where(monkeypatch, lambda case, one: one.kernel == failing)
    chosen = kv_backend(SPARSE)
    assert (chosen is SCATTER) == (failing == "kv_gather")
    if isinstance(chosen, KernelBackend):
        assert not chosen.tiles  # all of them, and none is asked of the indexer's keys


def test_an_indexers_keys_have_a_size_of_the_kernels(warned):
    assert kv_backend([SPARSE[0], IndexLayer.of("layers.0.1", 8, 24, 64)]) is SCATTER
    (line,) = warned
    assert "the indexer's keys: head size 24 is not supported" in line


def test_without_gathers_no_keys_and_values_are_built_of_latents(monkeypatch, warned):
    found_where(monkeypatch, lambda case, one: one.kernel == "kv_gather")
    chosen = kv_backend()
    assert isinstance(chosen, KernelBackend) and not chosen.reads_contexts
    for type_, builds in ((chosen, False), (KERNELS, True), (SCATTER, True)):
        state = LATENTS.allocate(4, 16, mx.float32, type_)
        plan = LATENTS.scope(state).plan_of(layout([(0, 40), (0, 1)]))
        assert (plan.prompts is not None) == builds
    (line,) = warned
    assert "kv_gather" in line


BF16, F32 = mx.bfloat16, mx.float32
FORM = StateFormat(((3, 96), (1, 32), (8, 16, 32)), (BF16, BF16, F32))
CONVOLUTIONS = (Convolution(96, 4, BF16, BF16, None), Convolution(32, 2, BF16, BF16, BF16))
DELTA = SequenceLayer(
    "layers.3",
    FORM,
    ops=RecurrentOps(CONVOLUTIONS, Recurrence((4, 32, 8, 16), BF16, BF16, 2, True)),
)
SCAN = SequenceLayer(
    "layers.4",
    StateFormat(((24, 16),), (BF16,)),
    ops=RecurrentOps((), Recurrence((1, 16, 24, 1), F32, F32, 0, False)),
)
BY_RUNS = RunLayer("layers.5", StateFormat(((64,),), (F32,)))


def test_layers_with_states_make_cases_of_their_states_and_have_states_moved():
    layers = [*LAYERS, DELTA, SCAN, BY_RUNS, DELTA]
    *attending, first, second, scan = choice.needed_cases(layers, BF16, mx.uint8, 16)
    assert [case.window for case in attending] == [None, 512]
    assert ["kv_states" in case.kernels for case in attending] == [True, False]  # in one storage
    for case in (first, second, scan):
        assert (case.shape, case.cache_dtype, case.block_size) == (SHAPE, mx.uint8, 16)
    assert (first.dtype, second.dtype, scan.dtype) == (BF16, BF16, F32)
    assert first.states == StateKind((4, 32, 8, 16), True, "heads", F32, 96, 4)
    assert second.states == StateKind(channels=32, taps=2)
    assert scan.states == StateKind((1, 16, 24, 1), False, "rates", BF16)
    assert in_use(first)[:2] == ["convolution", "recurrence"]
    assert in_use(second) == ["convolution"] and in_use(scan) == ["recurrence"]


def test_states_alone_are_checked_in_memory_of_their_own():
    memory, states = choice.needed_cases([SCAN], BF16, BF16, 256)
    assert {"kv_states", "kv_blocks", "graph"} <= set(in_use(memory))
    assert memory.cache_dtype == states.cache_dtype == F32 and states.dtype == F32
    (memory,) = choice.needed_cases([BY_RUNS], BF16, BF16, 256)
    assert "kv_states" in memory.kernels and memory.states is None


@pytest.mark.parametrize("layers", [[*LAYERS, DELTA], [DELTA, SCAN], [*LAYERS, BY_RUNS]])
@pytest.mark.parametrize("failed", ["convolution", "recurrence", "kv_states"])
def test_operations_compute_states_where_our_kernels_do_not(monkeypatch, warned, layers, failed):
    """One kind is enough: layers of all kinds share plans."""
    cases = choice.needed_cases(layers, BF16, BF16, 16)
    worst = [case for case in cases if Check(failed) in checks(case)][-1:]
    found_where(monkeypatch, lambda case, one: case in worst and one.kernel == failed)
    chosen = kv_backend(layers)
    if not worst:
        assert chosen == KERNELS and not warned
        return
    (line,) = warned
    assert failed in line and REASON in line
    if failed == "kv_states":
        assert chosen is SCATTER
        return
    assert isinstance(chosen, KernelBackend) and not chosen.computes_states
    assert (chosen.moves_blocks, chosen.repeatable) == (True, True)
    assert layers[-1].share(chosen.allocate_states(2, 1 << 20)).by_kernels is False


def times_are(monkeypatch: pytest.MonkeyPatch, mlx: dict[tuple[str, int | None], float]) -> None:
    """Makes the self-check pass, and MLX's attention take so much of the kernels' time.

    `mlx` is by kernel and window; missing times could not be measured.
    """

    def results(cases, tell=None):
        for case in cases:
            for one in checks(case):
                share = mlx.get((one.kernel, case.window))
                ways = {"metal": 1.0, "mlx": share}
                calls = {"1 x 64 of 16": 1e-3, "1 x 512 of 16": 4e-3}
                times = {
                    way: {call: seconds * factor for call, seconds in calls.items()}
                    for way, factor in ways.items()
                    if factor is not None
                }
                timed = one.kernel in CHOICES
                yield Outcome(
                    one.kernel,
                    case,
                    share is not None or not timed,
                    "ended its process with signal 9" if timed and share is None else "",
                    rows=one.rows,
                    wide=one.wide,
                    times=times if timed and share is not None else {},
                )

    monkeypatch.setattr(selfcheck, "results", lambda cases, tell: list(results(cases)))


WAYS = {  # MLX's share of the kernels' time by choice and window: what MLX then serves
    "kernels": ({("decode_way", None): 2.0, ("prefill_way", None): 1.2}, {}),
    "a tie": ({("prefill_way", None): 0.96}, {}),
    "prompts": (
        {("decode_way", None): 3.0, ("prefill_way", None): 0.5},
        {None: ByMLX(prompts={1: 64})},
    ),
    "both": (
        {("decode_way", None): 0.5, ("prefill_way", None): 0.5, ("prefill_way", 512): 0.9},
        {None: ByMLX(True, {1: 64}), 512: ByMLX(prompts={1: 64})},
    ),
    "no times": ({}, {}),
}


@pytest.mark.parametrize("name", with_more(WAYS, "both", "no times"))
def test_mlx_serves_the_rows_for_which_it_is_faster(monkeypatch, warned, name):
    shares, served = WAYS[name]
    said: list[str] = []
    monkeypatch.setattr(choice.logger, "info", lambda text, *values: said.append(text % values))
    times_are(monkeypatch, shares)
    chosen = kv_backend()
    assert isinstance(chosen, KernelBackend) and chosen.pipelined and chosen.repeatable
    assert chosen.by_mlx == {
        AttentionKind(SHAPE, window): by_mlx for window, by_mlx in served.items()
    }
    assert chosen.gathers == bool(served)
    assert not warned
    lines = [line for line in said if "µs" in line]
    assert len(lines) == len(shares)
    ways = [bool(one) for by in served.values() for one in (by.decodes, by.prompts)]
    assert sum("by MLX's attention" in line for line in lines) == sum(ways)
    if served:
        assert "1 x 64 of 16: 1000 and 500 µs, 1 x 512 of 16: 4000 and 2000 µs" in "".join(lines)
        assert any("by MLX's attention from 64 rows on;" in line for line in lines)
    with kernel.using(metal_interpreter.metal_kernel):
        assert_right(chosen, SHAPE)


@pytest.mark.parametrize(
    ("shares", "fewest"),
    [
        ({512: 0.5, 2048: 0.4}, 512),
        ({512: 1.2, 2048: 0.4}, 2048),
        ({512: 0.5, 2048: 0.96}, None),  # a tie
        ({512: 0.5, 2048: 2.0}, None),
        ({}, None),  # could not be timed
    ],
)
def test_mlx_takes_prompts_of_so_many_rows_as_it_is_faster_for(monkeypatch, shares, fewest):
    said: list[str] = []
    monkeypatch.setattr(choice.logger, "info", lambda text, *values: said.append(text % values))

    def results(cases, tell=None):
        for case in cases:
            for one in checks(case):
                timed = shares if one.kernel == "recurrence_way" else {}
                ways = {"metal": 1.0, "mlx": None} if timed else {}
                times = {
                    way: {f"1 x {rows}": whole or share for rows, share in shares.items()}
                    for way, whole in ways.items()
                }
                ok = one.kernel != "recurrence_way" or bool(shares)
                yield Outcome(
                    one.kernel,
                    case,
                    ok,
                    "" if ok else "no",
                    rows=one.rows,
                    wide=one.wide,
                    times=times,
                )

    monkeypatch.setattr(selfcheck, "results", lambda cases, tell: list(results(cases)))
    chosen = kv_backend([*LAYERS, DELTA])
    assert chosen.long_prompt == fewest and chosen.computes_states
    assert (chosen == KERNELS) == (fewest is None)
    (line,) = (line for line in said if line.startswith("long prompts"))
    assert (f"MLX from {fewest} rows on" if fewest else "by our kernels") in line
    # The tuner timed more lengths. A way that could not be timed at all does not serve.
    (kind,) = {
        str(case)
        for case in choice.needed_cases([*LAYERS, DELTA], BF16, BF16, 16)
        if Check("recurrence_way") in checks(case)
    }
    for found in (256, None):
        said.clear()
        kept = tuned.Loaded(tuned.Choices(long_prompt={kind: found}))
        chosen = choice.kv_backend("metal", [*LAYERS, DELTA], BF16, BF16, 16, tuned=kept)
        assert chosen.long_prompt == (found if shares else None)
        (line,) = (line for line in said if line.startswith("long prompts"))
        assert not shares or (f"MLX from {found} rows on" if found else "our kernels;") in line


def test_kernels_asked_for_by_name_are_not_timed(monkeypatch):
    asked = []

    def results(cases, tell=None):
        asked.extend(check for case in cases for check in checks(case))
        return [
            Outcome(one.kernel, case, True, rows=one.rows, wide=one.wide)
            for case in cases
            for one in asked
        ]

    monkeypatch.setattr(selfcheck, "results", results)
    monkeypatch.setenv("VLLM_METAL_KERNELS", "metal")
    assert isinstance(kv_backend(), KernelBackend)
    assert asked and not [check for check in asked if check.kernel in CHOICES]


def test_prompts_obey_the_tuners_file(monkeypatch, tmp_path):
    """By rows and contexts, and whether a kernel is forced, among those found right."""
    said: list[str] = []
    monkeypatch.setattr(choice.logger, "info", lambda text, *values: said.append(text % values))
    case, windowed = choice.needed_cases(LAYERS, BF16, BF16, 16)
    rows = {"1024": 512, "8192": 128, "32768": None}
    never = dict.fromkeys(rows)
    kept = tuned.Choices(
        prompt_rows={str(case): rows, str(windowed): never}, force_fused={str(case): False}
    )
    tuned.save(kept, folder=tmp_path)
    read = tuned.load(tmp_path)
    assert read.complaint is None and read.choices.prompt_rows == kept.prompt_rows
    times_are(monkeypatch, {("prefill_way", None): 2.0, ("prefill_way", 512): 0.5})
    chosen = choice.kv_backend("metal", LAYERS, BF16, BF16, 16, tuned=read)
    assert chosen.by_mlx == {
        AttentionKind(SHAPE, None): ByMLX(False, {1024: 512, 8192: 128, 32768: None}, False)
    }
    assert any(
        "by MLX's attention from 512 rows of 1024, 128 rows of 8192 on" in one for one in said
    )
    assert any("window 512" in line and "by our kernels" in line for line in said)
    tables = np.zeros((1, 2048), np.int32)
    for length, count, by_mlx in (
        (900, 511, False),
        (900, 512, True),
        (2800, 500, False),  # nearer to 1024
        (3000, 128, True),
        (3000, 127, False),
        (30000, 2000, False),
    ):
        starts, slots = np.array([0, count], np.int32), np.zeros(count, np.int32)
        where = StepLayout(starts, np.array([length], np.int32), tables, slots, 16)
        plan = chosen.plan(where, AttentionKind(SHAPE, None))
        assert (plan.gathered is not None) == by_mlx == (plan.attention is None)
        assert not by_mlx or not plan.gathered.prompts.force_fused
    found_where(monkeypatch, lambda case, one: one.kernel == "prefill_way")
    assert choice.kv_backend("metal", LAYERS, BF16, BF16, 16, tuned=read) == KERNELS


def test_the_memory_of_gathered_contexts_is_measured(monkeypatch):
    times_are(monkeypatch, {("prefill_way", None): 0.5})
    chosen = kv_backend()
    assert LAYERS[0].gathers(chosen)
    assert not LAYERS[0].gathers(KERNELS)
    # Four prompts of a step in each of three layers: K and V of 2 heads.
    context, bounds = 500, StepBounds(256, 4, 16)
    of_prompt = 2 * 2 * 500 * 128 * F32.size
    with kernel.using(metal_interpreter.metal_kernel):
        LAYERS[0].profile(context, bounds, F32, F32, chosen)  # compiles
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        LAYERS[0].profile(context, bounds, F32, F32, chosen)
    assert 3 * 4 * of_prompt < mx.get_peak_memory() - before < 3 * 4 * of_prompt + 2**24


def test_the_memory_of_what_is_built_of_latents_is_measured():
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert LATENTS.gathers(KERNELS)
    LATENTS.profile(3000, StepBounds(256, 4, 16), F32, F32, KERNELS)
    built = 3000 * LATENTS.num_heads * (32 + 64 + 32) * F32.size
    assert built < mx.get_peak_memory() - before < 2**28
    assert not LATENTS.gathers(KernelBackend(reads_contexts=False))


@pytest.mark.parametrize("layer", SPARSE, ids=["latents", "index keys"])
def test_the_memory_of_sparse_attention_is_measured_and_bounded(layer):
    """Scores and rows of 4096 tokens at once would take three times the bound."""
    layer = replace(layer, num_heads=64)
    assert layer.gathers(KERNELS) and layer.gathers(SCATTER)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    layer.profile(3000, StepBounds(4096, 4, 16), F32, F32, SCATTER)
    assert 2**27 < mx.get_peak_memory() - before < 2**31  # MLX's CPU backend runs ahead


TABLES = np.array([range(40), [40, 41] * 20], np.int32)  # of two requests
STEPS = [  # (positions before, rows) of each
    [(0, 30), (0, 12)],
    [(30, 1), (12, 3)],
    [(31, 1), (15, 1)],
    [(600, 1), (16, 1)],  # in parts
    [(601, 1), (17, 20)],  # a chunk beside a decode
    [(602, 20), (37, 1)],
]


def layout(requests: list[tuple[int, int]]) -> StepLayout:
    before, rows = np.array(requests, np.int32).T
    request = np.repeat(np.arange(2), rows)
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    positions = before[request] + np.arange(starts[-1]) - starts[request]
    slots = TABLES[request, positions // 16] * 16 + positions % 16
    return StepLayout(starts, before + rows, TABLES, slots.astype(np.int32), 16)


def assert_right(chosen: type[LayerKVCache], shape: AttentionShape) -> None:
    """Compares decodes, windows, prompts, split contexts and whole blocks with MLX's operations."""
    rows = KVShape(shape.num_kv_heads, shape.head_size, shape.head_size)
    kv_caches = [kind.allocate(48, 16, rows, mx.float32) for kind in (chosen, SCATTER)]
    rng = np.random.default_rng(0)
    for requests in STEPS:
        where, heads = layout(requests), (shape.num_heads, *[shape.num_kv_heads] * 2)
        num_rows = int(where.query_start_loc_np[-1])
        queries, keys, values = (
            mx.array(rng.normal(size=(num_rows, num, shape.head_size)).astype(np.float32))
            for num in heads
        )
        answers = []
        for kv_cache in kv_caches:
            kv_cache.begin_step()
            kv_cache.copy_blocks(np.array([0, 40]), np.array([46, 47]))
            kv_cache.clear_blocks(np.array([44, 39]))
            plan = kv_cache.backend.plan(where, AttentionKind(shape, None))
            kv_cache.write(plan, keys, values)
            out = kv_cache.attend(plan, queries, Scoring(0.1))
            mx.eval(out)
            answers.append(np.array(out))
        np.testing.assert_allclose(*answers, atol=1e-5)
    for kv_cache in kv_caches:
        kv_cache.begin_step()
    pairs = zip(*(kv_cache.arrays for kv_cache in kv_caches), strict=True)
    assert all(mx.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    ("head_size", "tile_rows", "most", "lost"),
    [
        # As it is, no pipeline asks for so many.
        pytest.param(192, None, 384, (), marks=pytest.mark.slow),
        pytest.param(64, None, 384, (), marks=pytest.mark.slow),
        # Twice the rows that a tile of this size has: 512 threads.
        pytest.param(192, 64, 384, (64,), marks=pytest.mark.more),
        (64, None, 192, None),  # a write takes 256, too
    ],
)
def test_a_pipeline_that_takes_fewer_threads_costs_its_tile_only(
    monkeypatch, warned, head_size, tile_rows, most, lost
):
    if tile_rows is not None:
        monkeypatch.setattr(AttentionShape, "tile_rows", tile_rows)
    Tiles.for_layer.cache_clear()
    layers = [AttentionLayer("layers.0", 4, 1, head_size, None)]
    double = Refusing(metal_interpreter.metal_kernel, most)

    def results(cases, tell=None):
        with kernel.using(double.metal_kernel), double.evaluating():
            return [outcome for case in cases for outcome in check(case, 8)]

    monkeypatch.setattr(selfcheck, "results", results)
    monkeypatch.setattr(timing, "compare", lambda *case: {})
    try:
        chosen = kv_backend(layers, mx.float32)
        whole = Tiles.for_layer(layers[0].shape)
        if lost is None:
            assert chosen is SCATTER
        elif not lost:
            assert chosen == KERNELS and not warned
        else:
            (tiles,) = chosen.tiles.values()
            kept = tuple(rows for rows in whole.prefill if rows not in lost)
            assert tiles == replace(whole, prefill=kept)
            assert "Thread group size (512) is greater than  the maximum" in warned[0]
            assert "prefill of 64 rows" in warned[0]
        double.launched.clear()
        with kernel.using(double.metal_kernel), double.evaluating():
            assert_right(chosen, layers[0].shape)
        if lost is not None:
            kernels = {name for name, _ in double.launched}
            assert {"kv_write", "kv_blocks", "decode", "prefill", "reduce"} == kernels
    finally:
        Tiles.for_layer.cache_clear()


def test_mlxs_operations_do_not_inherit_the_interpreter(monkeypatch):
    """Graphs are compiled again after an interpreted engine in the same process."""
    with kernel.using(kernel.named(extras.INTERPRETER)):
        monkeypatch.setenv("VLLM_METAL_KERNELS", "mlx")
        assert choice.kv_backend("cpu", LAYERS, mx.float32, mx.float32, 16) is SCATTER
        assert kernel.in_graphs()
