# SPDX-License-Identifier: Apache-2.0
"""Backend choice by alternate timings: the median, and our kernels in a tie."""

import re

import metal_interpreter
import mlx.core as mx
import pytest

from metal_kernels import kernel, paged_attention
from metal_kernels.pace import MOST_WORK
from metal_kernels.paged_attention import (
    AttentionPlan,
    AttentionShape,
    Tiles,
    gathered,
    prompts,
)
from metal_kernels.selfcheck import Case, Outcome, contiguous, timing

CASES = [
    Case(AttentionShape(4, 2, 64, 64), mx.float16, mx.uint8, 16, window=40, softcap=30.0),
    Case(AttentionShape(16, 1, 576, 512), mx.float16, mx.float16, 16),
    Case(AttentionShape(4, 2, 64, 64), mx.float16, mx.uint8, 16, window=40),
]
BATCHES = {"decode_way": [(2, 1, 64)], "prefill_way": [(1, 20, 64)]}
TIMED = [
    (CASES[0], "decode_way"),
    pytest.param(CASES[1], "decode_way", marks=pytest.mark.more),
    (CASES[2], "prefill_way"),
]


@pytest.mark.parametrize(("case", "choice"), TIMED, ids=str)
def test_both_ways_run_in_turn_and_the_median_counts(case, choice):
    # The clock is read before and after the calls of a way: its 12 pairs are six rounds of both.
    took = [100.0, 100.0, 1.0, 20.0, 2.0, 10.0, 9.0, 30.0, 3.0, 40.0, 4.0, 50.0]
    now, ticks = 0.0, []
    for seconds in took:
        ticks += [now, now + seconds]
        now += seconds + 7.0
    left = iter(ticks)
    with kernel.using(metal_interpreter.metal_kernel):
        tiles = Tiles.for_layer(case.shape, case.window)
        found = timing.compare(case, choice, tiles, BATCHES[choice], lambda: next(left))
    assert next(left, None) is None
    ((requests, query, context),) = BATCHES[choice]
    calls = 20 if choice == "decode_way" else 2
    name = f"{requests} x {query} of {context}"
    assert found == {"metal": {name: 3.0 / calls}, "mlx": {name: 30.0 / calls}}


@pytest.mark.parametrize(("case", "choice"), TIMED, ids=str)
def test_calls_go_through_so_many_bytes_before_any_is_read_again(monkeypatch, case, choice):
    """No system cache may hold the K and V that a call reads."""
    by_mlx = gathered if choice == "decode_way" else prompts
    read: dict[object, list[bytes]] = {paged_attention: [], by_mlx: []}
    for module, tables in read.items():

        def run(plan, queries, *_, after, tables=tables, **__):
            if isinstance(plan, AttentionPlan):
                tables.append(bytes(plan.block_tables))
            else:
                calls = plan.buckets if choice == "decode_way" else plan.prompts
                tables.append(bytes(calls[0].block_table))
            return queries, [after]

        monkeypatch.setattr(module, "run", run)
    ((requests, _, context),) = BATCHES[choice]
    of_call = requests * context * timing.Layer(case, context).row_bytes
    of_call *= 1 if case.shape.latent else 2
    tiles = Tiles.for_layer(case.shape, case.window)
    timing.compare(case, choice, tiles, BATCHES[choice], rotated=5 * of_call)
    for tables in read.values():
        assert len(tables) > 10 and len(set(tables)) == 5
        assert all(len(set(tables[at : at + 5])) == 5 for at in range(len(tables) - 4))
    assert timing.ROTATED >= 2**28


def test_calls_of_a_round_fit_a_command_buffer(monkeypatch):
    for module in (paged_attention, gathered, prompts):  # nothing attends
        monkeypatch.setattr(
            module, "run", lambda plan, queries, *_, after, **__: (queries, [after])
        )
    large = Case(AttentionShape(2048, 1, 576, 512), mx.float16, mx.float16, 16)
    batches = [(1, 8, 2**16), (1, 8, 16)]
    found = timing.compare(large, "prefill_way", Tiles.for_layer(large.shape), batches)
    asked = [re.fullmatch(r"1 x 8 of (\d+)", name)[1] for name in found["mlx"]]
    context, short = map(int, asked)
    assert 8 < context < 2**16 and short == 16
    work = 2 * large.shape.work(8 * large.shape.group, context)  # of a round's two calls
    assert MOST_WORK // 2 < work <= MOST_WORK


@pytest.mark.parametrize(
    ("mlx", "fastest"),
    [((1.0, 1.0), "metal"), ((0.96, 0.96), "metal"), ((0.9, 0.9), "mlx"), ((0.25, 4.0), "metal")],
)
def test_another_way_wins_only_clearly_and_over_all_calls(mlx, fastest):
    times = {"metal": {"a": 1.0, "b": 1.0}, "mlx": dict(zip("ab", mlx, strict=True))}
    assert Outcome("decode_way", CASES[0], True, times=times).fastest == fastest
    assert Outcome("decode_way", CASES[0], False, times=times).fastest == "metal"
    assert Outcome("decode_way", CASES[0], True).fastest == "metal"
    more = times | {"other": {"a": 0.1, "b": 0.1}}
    assert Outcome("decode_way", CASES[0], True, times=more).fastest == "other"


@pytest.mark.parametrize(
    ("mlx", "fewest"),
    [((0.9, 0.9), 64), ((0.96, 0.9), 512), ((0.5, 0.96), None), ((2.0, 0.5), 512)],
)
def test_rows_from_which_a_way_wins_are_those_from_which_all_calls_do(mlx, fewest):
    names = ("1 x 64 of 4096", "1 x 512 of 4096")
    times = {"metal": dict.fromkeys(names, 1.0), "mlx": dict(zip(names, mlx, strict=True))}
    assert Outcome("prefill_way", CASES[2], True, times=times).fewest_rows == fewest
    assert Outcome("prefill_way", CASES[2], False, times=times).fewest_rows is None
    assert Outcome("prefill_way", CASES[2], True).fewest_rows is None


def test_decodes_are_timed_beside_mlx_s_attention_over_k_and_v_side_by_side():
    plain = Case(AttentionShape(4, 2, 64, 64), mx.float16, mx.float16, 16)
    took = {"metal": 2.0, "mlx": 6.0, contiguous.BACKEND: 1.0}
    ticks = [tick for _ in range(6) for seconds in took.values() for tick in (0.0, seconds)]
    left = iter(ticks)
    with kernel.using(metal_interpreter.metal_kernel):
        tiles = Tiles.for_layer(plain.shape)
        times = timing.compare(plain, "decode_way", tiles, [(2, 1, 64)], lambda: next(left))
    name = "2 x 1 of 64"
    assert times == {way: {name: seconds / 20} for way, seconds in took.items()}
    moved = 2 * 64 * 2 * 2 * 64 * 2  # requests, positions, K and V, heads, elements, bytes
    shares = contiguous.decode_shares(plain, times, copy=20 * moved)
    assert shares == {name: {"copy": 0.5, "mlx": 0.5}} and set(times) == {"metal", "mlx"}
    others = {"metal": {name: 1.0}, "mlx": {name: 1.0}}
    assert "mlx" not in contiguous.decode_shares(CASES[0], others, copy=1.0)[name]


def test_prompts_are_timed_at_the_rows_that_streams_leave():
    rows = [rows for _, rows, _ in timing.COMPARED["prefill_way"]]
    assert rows == [64, 128, 256, 512]
    names = [f"1 x {count} of 4096" for count in rows]
    for first_won, fewest in enumerate([64, 128, 256, 512, None]):
        mlx = {name: 0.5 if place >= first_won else 1.0 for place, name in enumerate(names)}
        times = {"metal": dict.fromkeys(names, 1.0), "mlx": mlx}
        assert Outcome("prefill_way", CASES[2], True, times=times).fewest_rows == fewest
