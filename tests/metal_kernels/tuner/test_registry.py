# SPDX-License-Identifier: Apache-2.0
"""Each choice finds its planted optimum within 24 noisy timings."""

import random
from dataclasses import replace

import metal_interpreter
import mlx.core as mx
import pytest

from metal_kernels import kernel
from metal_kernels.paged_attention import AttentionShape, Tiles
from metal_kernels.paged_attention.common_prefix import LEAST_SAVED
from metal_kernels.selfcheck import Case, StateKind
from metal_kernels.tuner import (
    decode_rows,
    dispatches,
    force_fused,
    long_prompt,
    prompt_rows,
    shared,
)
from metal_kernels.tuner.choice import Layer
from metal_kernels.tuner.long_prompt import Variant
from metal_kernels.tuner.registry import CHOICES, OF_PROCESSES
from metal_kernels.tuner.shares import facts, shares
from metal_kernels.tuner.stopwatch import Timing
from tests.metal_kernels.tuner.fakes import Machine, Once

CASE = Case(AttentionShape(4, 1, 64, 64), mx.float16, mx.float16, 16)
LARGE = replace(CASE, shape=AttentionShape(2, 1, 192, 128))
STATES = replace(
    CASE, states=StateKind((2, 64, 4, 32), delta=True, channels=24), kernels=("recurrence",)
)
PROMPTS = (64, 128, 256, 512, 1024, 2048)
SEEDS = range(20)


def layer_of(case: Case) -> Layer:
    tiles = Tiles.for_layer(case.shape)
    return Layer(case, tiles, states=True, gathered=True, context=256, prompts=(20, 24))


@pytest.mark.parametrize("best", [8, 16, 32, 64])
def test_the_planted_tile_of_drafts_is_found(best):
    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        seconds = {size: 1e-3 * max(size / best, best / size) ** 0.5 for size in (8, 16, 32, 64)}
        found = decode_rows.search(
            lambda size: machine.time(size, seconds[size]),  # noqa: B023
            (8, 16, 32, 64),
        )
        assert found.values == {"decode_rows": best}
        assert len(machine.stopwatch.timings) <= 24


@pytest.mark.parametrize("first", [*PROMPTS, None])
def test_the_planted_length_of_prompts_is_found(first):
    def seconds(variant: Variant) -> float:
        wins = first is not None and variant.rows >= first
        return variant.rows * 1e-5 * ((0.7 if wins else 1.3) if variant.backend == "mlx" else 1.0)

    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        found = long_prompt.search(lambda variant: machine.time(variant, seconds(variant)), PROMPTS)  # noqa: B023
        assert found.values == {"long_prompt": first}
        assert len(machine.stopwatch.timings) <= 24


def test_a_prompt_by_mlx_must_be_faster_by_5_per_cent():
    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        found = long_prompt.search(
            lambda variant: machine.time(variant, 1e-3 if variant.backend == "mlx" else 1.04e-3),  # noqa: B023
            PROMPTS,
        )
        assert found.values == {"long_prompt": None}


LENGTHS = (256, 512, 1024, 2048, 4096)


@pytest.mark.parametrize("first", [*LENGTHS, None])
def test_the_planted_length_of_shared_prefixes_is_found(first):
    """Seven tiles share from 1024 positions, which is the first length to save 4096 keys."""

    def seconds(variant: shared.Variant) -> float:
        wins = first is not None and variant.common >= first
        return variant.common * 1e-6 * ((0.7 if wins else 1.3) if variant.shares else 1.0)

    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        found = shared.search(lambda variant: machine.time(variant, seconds(variant)), LENGTHS, 7)  # noqa: B023
        wanted = {1024: LEAST_SAVED, None: None}.get(first, 7 * (first or 0))
        assert found.values == {"shared": wanted}
        assert (found.gain > 1.1) == (first != 1024)
        assert len(machine.stopwatch.timings) <= 24


@pytest.mark.parametrize("shared_takes", [0.96e-3, 1.04e-3])
def test_prefixes_are_shared_as_by_default_unless_5_per_cent_are_lost(shared_takes):
    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        found = shared.search(
            lambda variant: machine.time(variant, shared_takes if variant.shares else 1e-3),  # noqa: B023
            LENGTHS,
            7,
        )
        assert found.values == {"shared": LEAST_SAVED} and found.gain == 1


CONTEXTS = (1024, 8192, 32768)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_planted_rows_of_prompts_by_mlx_are_found_for_each_context(seed):
    drawn = random.Random(seed)
    first = {context: drawn.choice([*PROMPTS[:4], None]) for context in CONTEXTS}

    def seconds(variant: prompt_rows.Variant) -> float:
        wins = first[variant.context] is not None and variant.rows >= first[variant.context]
        return (
            variant.rows
            * variant.context
            * 1e-8
            * ((0.7 if wins else 1.3) if variant.backend == "mlx" else 1.0)
        )

    machine = Machine(seed, noise=0.1)
    found = prompt_rows.search(
        lambda variant: machine.time(variant, seconds(variant)), CONTEXTS, PROMPTS[:4]
    )
    assert found.values == {"prompt_rows": {str(at): rows for at, rows in first.items()}}
    assert len(machine.stopwatch.timings) <= 24
    wins = sum(rows is not None for rows in first.values())
    assert found.gain == pytest.approx((1 / 0.7) ** (wins / 3), rel=0.1)


def test_prompts_by_mlx_must_be_faster_by_5_per_cent_in_both_orders():
    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        found = prompt_rows.search(
            lambda variant: machine.time(variant, 1e-3 if variant.backend == "mlx" else 1.04e-3),  # noqa: B023
            CONTEXTS,
            PROMPTS[:4],
        )
        assert set(found.values["prompt_rows"].values()) == {None}
    # The second of a pair is slower, whichever it is, where ours is timed last.
    times = {"metal": iter([1.3, 1.3, 1.3, 1.0]), "mlx": iter([1.0] * 4)}

    def measure(variant: prompt_rows.Variant) -> Timing:
        return Timing(str(variant), (next(times[variant.backend]),) * 5)

    found = prompt_rows.search(measure, (1024,), PROMPTS[:4])
    assert found.values == {"prompt_rows": {"1024": None}} and found.gain == 1.0


@pytest.mark.parametrize(("forced", "kept"), [(1.0, True), (1.04, True), (1.3, False)])
def test_a_fused_kernel_is_forced_unless_mlx_knows_better(forced, kept):
    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        found = force_fused.search(
            lambda variant: machine.time(variant, 1e-3 * (forced if variant else 1.0))  # noqa: B023
        )
        assert found.values == {"force_fused": kept}
        assert len(machine.stopwatch.timings) <= 24


@pytest.mark.parametrize("best", [50, 100, 200, 500, 1000])
@pytest.mark.parametrize("current", [50, 200])
def test_the_planted_number_of_dispatches_is_found(best, current):
    def seconds(value: int) -> float:
        return 1e-3 * max(value / best, best / value) ** 0.4

    for seed in SEEDS:
        machine = Machine(seed, noise=0.1)
        found = dispatches.search(lambda value: machine.time(value, seconds(value)), current)  # noqa: B023
        assert seconds(found.value) == min(map(seconds, dispatches.VALUES))
        assert len(machine.stopwatch.timings) <= 24


@pytest.mark.parametrize("choice", CHOICES[1:], ids=lambda choice: choice.name)
def test_every_choice_runs_on_a_layer(choice, monkeypatch):
    """Interpreted."""
    attend, forced = mx.fast.scaled_dot_product_attention, set()

    def on_a_cpu(*args, force_fused, **options):  # which has no fused kernels
        forced.add(force_fused)
        return attend(*args, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", on_a_cpu)
    layer = layer_of({long_prompt.CHOICE: STATES, force_fused.CHOICE: LARGE}.get(choice, CASE))
    assert choice.wanted(layer)
    stopwatch = Once()
    with kernel.using(metal_interpreter.metal_kernel):
        chosen = choice.search(layer, stopwatch)
    assert chosen.values and chosen.gain > 0
    assert 0 < len(stopwatch.timings) <= 24
    by_mlx = {prompt_rows.CHOICE: {False}, force_fused.CHOICE: {False, True}}
    assert forced == by_mlx.get(choice, set())
    if choice is force_fused.CHOICE:  # by the longest of the layer's prompts
        assert {timing.variant.split(",")[0] for timing in stopwatch.timings} == {"24 rows"}


def test_choices_are_left_where_there_is_nothing_to_choose():
    wanted = {choice.name for choice in CHOICES if choice.wanted(layer_of(CASE))}
    assert wanted == {
        "parts of contexts",
        "tiles of drafts",
        "shared prefixes",
        "prompts by MLX's attention",
    }
    one_tile = replace(layer_of(CASE), tiles=Tiles((8,), (64,), False), gathered=False)
    assert not any(choice.wanted(one_tile) for choice in CHOICES)
    assert force_fused.CHOICE.wanted(layer_of(LARGE))
    assert not force_fused.CHOICE.wanted(replace(layer_of(LARGE), gathered=False))
    unchecked = replace(layer_of(STATES), states=False, gathered=False)
    assert not any(choice.wanted(unchecked) for choice in CHOICES)


def test_a_process_times_as_many_dispatches_as_a_step_has():
    stopwatch = Once()
    dispatches.time_step(stopwatch, layers=2)
    assert [timing.variant for timing in stopwatch.timings] == ["28 dispatches in a row"]
    assert set(OF_PROCESSES) == {"dispatches"}


def test_facts_and_shares_of_small_ones():
    stopwatch = Once()
    found = facts(stopwatch, copied=2**12, matrix=8, chain=4)
    assert len(found) == 3 and min(found.values()) > 0
    with kernel.using(metal_interpreter.metal_kernel):
        seen = list(shares(layer_of(CASE), stopwatch))
        coded = list(shares(layer_of(replace(CASE, cache_dtype=mx.int8)), stopwatch))
    assert [share.name for share in seen] == ["1 x 1 of 256", "8 x 1 of 32", "1 x 4 of 32"]
    row = 1 * 64 * 2  # bytes of a position's K: heads, elements, float16
    assert [share.moved for share in seen] == [2 * row * 256, 2 * row * 256, 2 * row * 32]
    assert all(share.ours > 0 and share.mlx is not None for share in seen)
    assert all(share.mlx is None for share in coded)
