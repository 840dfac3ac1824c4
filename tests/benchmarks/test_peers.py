# SPDX-License-Identifier: Apache-2.0
"""Requests and results of benchmarks/peers.py."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _peers_turns
import peers
import pytest
from _peers_process import Run
from _peers_report import MLX_LM_SERVER, OURS_OFF, OURS_ON, growth, plot, report
from _peers_turns import (
    COLD,
    GIVEN,
    MLX_LM,
    NONE,
    ONE,
    OURS,
    SHARED,
    UNRELATED,
    VLLM_CPU,
    WARM,
    Figures,
    IdleMeter,
    Sizes,
    agreement,
    await_idle,
    compare,
    in_turn,
    measure,
    prompts_of,
    turn,
)

SIZES = Sizes(streams=3, shared=20, own=4, unrelated=8, output=5)


class FakePeer:
    """Answers at once, each token after a second; records its requests."""

    def __init__(self, name: str, token: int = 7, cpu: float = 0.0) -> None:
        self.name = name
        self.token = token
        self.cpu = cpu
        self.asked: list[Any] = []

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, **arguments: Any) -> Run:
        self.asked.append((prompts, max_tokens, arguments))
        count = len(prompts)
        return Run([1.0] * count, [1.0 * max_tokens] * count, [[self.token] * max_tokens] * count)

    def ask(self, method: str, **arguments: object) -> None:
        self.asked.append(method)

    def cpu_seconds(self) -> float:
        return self.cpu


def test_requests_of_a_part_share_what_they_should() -> None:
    shared = prompts_of(SHARED, SIZES, 1000, seed=3)
    assert [len(prompt) for prompt in shared] == [24] * 3
    assert len({tuple(prompt[:20]) for prompt in shared}) == 1
    assert len({tuple(prompt[20:]) for prompt in shared}) == 3
    unrelated = prompts_of(UNRELATED, SIZES, 1000, seed=3)
    assert [len(prompt) for prompt in unrelated] == [8] * 3
    assert len({prompt[0] for prompt in unrelated}) == 3
    assert [len(prompt) for prompt in prompts_of(ONE, SIZES, 1000, seed=3)] == [8]
    assert prompts_of(SHARED, SIZES, 1000, seed=4) != shared == prompts_of(SHARED, SIZES, 1000, 3)


def test_vllm_begins_with_an_empty_cache_and_mlx_lm_is_given_the_prefix() -> None:
    prompts = prompts_of(SHARED, SIZES, 1000, seed=0)
    vllm, mlx_lm = FakePeer(OURS), FakePeer(MLX_LM)
    assert list(turn(vllm, SHARED, prompts, SIZES)) == [COLD, WARM]
    assert vllm.asked == ["forget", (prompts, 5, {}), (prompts, 5, {})]
    assert list(turn(mlx_lm, SHARED, prompts, SIZES)) == [NONE, GIVEN]
    assert mlx_lm.asked == [(prompts, 5, {}), (prompts, 5, {"shared": 20})]
    assert list(turn(vllm, ONE, prompts[:1], SIZES)) == [COLD]
    assert list(turn(mlx_lm, ONE, prompts[:1], SIZES)) == [NONE]


def test_figures_count_from_when_all_were_sent() -> None:
    run = Run(first=[1.0, 2.0, 6.0], last=[3.0, 8.0, 10.0], tokens=[[1] * 5, [1] * 5, [1] * 3])
    figures = Figures.of(run)
    assert figures.tokens_per_s == pytest.approx(13 / 10)
    assert figures.ttft_ms == pytest.approx(3000)
    assert figures.tpot_ms == pytest.approx(1500)  # of 500, 1500 and 2000


def test_everybody_is_first_as_often_as_the_others() -> None:
    turns = list(in_turn(["a", "b", "c"], 3))
    assert [name for _, name in turns] == list("abcbcacab")
    assert [repeat for repeat, _ in turns] == [0] * 3 + [1] * 3 + [2] * 3


def test_all_peers_get_the_same_requests_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_peers_turns.time, "sleep", lambda seconds: None)
    asked = [FakePeer(OURS), FakePeer(MLX_LM), FakePeer(VLLM_CPU)]
    notes: list[str] = []
    found, idle = measure(UNRELATED, asked, SIZES, 2, 1000, notes.append)
    assert {
        name: {state: len(runs) for state, runs in of.items()} for name, of in found.items()
    } == {
        OURS: {COLD: 2},
        MLX_LM: {NONE: 2},
        VLLM_CPU: {COLD: 2},
    }
    assert idle == 0.0 and len(notes) == 6
    sent = [[each for each in peer.asked if each != "forget"] for peer in asked]
    assert sent[0] == sent[1] == sent[2]
    (warm, few, _), *measured = sent[0]
    assert few < SIZES.output and all(prompts != warm for prompts, *_ in measured)


def test_a_turn_begins_when_nobody_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, slept = FakePeer(VLLM_CPU), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) < 1.0:
            peer.cpu += seconds

    monkeypatch.setattr(_peers_turns.time, "sleep", sleep)
    await_idle([FakePeer(OURS), peer])
    assert 1.0 <= sum(slept) < 2.0
    monkeypatch.setattr(peer, "cpu_seconds", itertools.count().__next__)
    await_idle([peer])  # ends, though the peer never sleeps


def test_cpu_time_of_those_who_wait_is_a_share_of_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = itertools.count(100.0, 4.0)
    monkeypatch.setattr(_peers_turns.time, "perf_counter", lambda: next(clock))
    busy, idle = FakePeer("busy", cpu=5.0), FakePeer("idle", cpu=3.0)
    meter = IdleMeter([busy, idle])

    def work() -> dict[str, Run]:
        busy.cpu += 8.0
        idle.cpu += 1.0
        return {}

    meter.during(busy, work)
    assert meter.share == pytest.approx(1 / 4)
    meter.during(idle, work)
    assert meter.share == pytest.approx(8 / 4)
    meter.during(busy, work)
    assert meter.share == pytest.approx(8 / 4)  # the worst turn's


def test_ratios_are_medians_of_those_of_each_repeat() -> None:
    def runs(*rates: float) -> list[Figures]:
        return [Figures(rate, 10 * rate, 20.0) for rate in rates]

    found = {OURS: {COLD: runs(2.0, 30.0, 8.0)}, MLX_LM: {NONE: runs(1.0, 10.0, 2.0)}}
    (row,) = compare(ONE, found)  # vLLM's CPU backend was left out
    assert row["peer"] == MLX_LM and row["goal"] == 1.3
    assert row["tokens_per_s"] == pytest.approx(3.0)  # of 2, 3 and 4
    assert row["tpot_ms"] == pytest.approx(1.0)


def test_a_peer_that_says_something_else_is_named() -> None:
    same = agreement([FakePeer(OURS), FakePeer(MLX_LM)], [1, 2, 3, 4])
    assert len(same) == 5 and len({tuple(answer) for answer in same.values()}) == 1
    other = agreement([FakePeer(OURS), FakePeer(MLX_LM, token=8)], [1, 2, 3, 4])
    assert other[OURS] != other[MLX_LM] == other[f"{MLX_LM}, in a batch"]
    assert other[OURS] != other[f"{MLX_LM}, {GIVEN}"]
    said = {"equal": False, "answers": {OURS: "Paris", MLX_LM: "Rome"}}
    lines = peers.warnings_of({"agreement": said, ONE: {"idle_cpu_share": 0.3}})
    assert "DIFFER" in lines[0] and any("Rome" in line for line in lines)
    assert "30% of a core" in lines[-1]
    assert peers.warnings_of({"agreement": {"equal": True}, ONE: {"idle_cpu_share": 0.0}}) == []


def found() -> dict[str, Any]:
    """Results of two repeats, as peers.py stores them."""
    runs = {
        OURS: {COLD: [Figures(20.0, 300.0, 40.0)] * 2, WARM: [Figures(36.0, 100.0, 40.0)] * 2},
        MLX_LM: {NONE: [Figures(4.0, 900.0, 50.0)] * 2, GIVEN: [Figures(18.0, 500.0, 50.0)] * 2},
    }
    as_json = {
        name: {state: [dataclasses.asdict(run) for run in of] for state, of in states.items()}
        for name, states in runs.items()
    }

    def turns(*times: float) -> list[list[dict]]:
        return [
            [{"ttft_ms": each, "prompt_tokens": 100, "cached_tokens": 64} for each in times]
        ] * 2

    chats = {
        OURS_ON: turns(90.0, 50.0, 60.0, 55.0),
        OURS_OFF: turns(90.0, 200.0, 300.0, 400.0),
        MLX_LM_SERVER: turns(95.0, 50.0, 50.0, 70.0),
    }
    return {
        SHARED: {"runs": as_json, "ratios": compare(SHARED, runs)},
        "chat": {"chats": chats},
    }


@pytest.mark.more  # it draws, as the one below
def test_report_has_every_ratio_beside_its_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report(found())
    lines = capsys.readouterr().out.splitlines()
    (ratio,) = (line for line in lines if "warm / mlx-lm no cache" in line)
    assert [cell.strip() for cell in ratio.split("|")[2:6]] == ["9.00", "0.11", "0.80", "≥ 8.0"]
    (given,) = (line for line in lines if "warm / mlx-lm prefix given" in line)
    assert [cell.strip() for cell in given.split("|")[2:6]] == ["2.00", "0.20", "0.80", "–"]
    assert any(line.startswith("| 2 | 50 (64 of 100) | 200 ") for line in lines)
    assert any(line.startswith(f"{OURS_ON}: ") and "1.20 ×" in line for line in lines)
    plot(found(), tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 0


def test_growth_is_of_the_worst_later_turn() -> None:
    assert growth([999.0, 10.0, 12.0, 11.0]) == pytest.approx(1.2)


@pytest.mark.more
def test_parts_measured_apart_are_kept_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["peers.py", "--out", str(tmp_path)])
    args = peers.parse_args()
    both = found()
    peers.keep({SHARED: both[SHARED]}, SIZES, "models/toy", args)
    peers.keep({"chat": both["chat"]}, Sizes(), "models/toy", args)
    kept = json.loads((tmp_path / "peers.json").read_text())
    assert kept[SHARED]["ratios"] == both[SHARED]["ratios"]
    assert kept[SHARED]["setting"]["sizes"]["streams"] == 3
    assert kept["chat"]["setting"]["sizes"]["streams"] == 16
    assert (tmp_path / "peers.png").exists()
