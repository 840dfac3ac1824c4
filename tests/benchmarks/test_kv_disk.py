# SPDX-License-Identifier: Apache-2.0
"""Comparisons of benchmarks/kv_disk.py, with a fake engine."""

from pathlib import Path

import numpy as np
import pytest
from _kv_files import FileBench, PageShape
from _kv_streams import Gaps, beside_loads, stuck_disk

from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.space import WriteResult
from vllm_metal.kv_transfer.disk.store import DiskStore


class FakeEngine:
    """Makes a stream token per step; a prompt loads, then begins, then answers."""

    def __init__(self) -> None:
        self._number = 0
        self._stream = ""
        self._steps_left: dict[str, int] = {}
        self.hits = 0.0

    def add(self, prompt: list[int], max_tokens: int = 1) -> str:
        self._number += 1
        name = str(self._number)
        if max_tokens > 1:
            self._stream = name
        else:
            self.hits += len(prompt)
            self._steps_left[name] = 3
        return name

    def step(self) -> dict[str, int]:
        self._steps_left = {name: left - 1 for name, left in self._steps_left.items() if left}
        return {self._stream: 1} | {name: 1 for name, left in self._steps_left.items() if not left}

    def is_loading(self, name: str) -> bool:
        return self._steps_left.get(name, 0) > 1

    def counter(self, name: str) -> float:
        return self.hits

    def flush(self) -> None: ...

    def forget(self) -> None: ...

    def stop(self, name: str) -> None: ...


def test_a_gap_counts_as_loading_while_the_load_goes_on() -> None:
    figures = beside_loads(FakeEngine(), [[1] * 64, [2] * 64], rounds=3, alone_tokens=5)
    assert figures["loads"] == 6
    number = {name: gaps["number"] for name, gaps in figures["ms"].items()}
    assert number == {"alone": 30, "loading": 6, "with the answer": 18}


def test_prompts_that_were_computed_are_no_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine, "counter", lambda name: 0.0)
    with pytest.raises(AssertionError, match="0 of"):
        beside_loads(engine, [[1] * 64], rounds=1, alone_tokens=2)


def test_gaps_are_percentiles_in_milliseconds() -> None:
    seconds = np.random.default_rng(0).exponential(size=500).tolist()
    gaps = Gaps.of(seconds)
    assert gaps.number == 500
    assert gaps.p50 == pytest.approx(1e3 * np.median(seconds))
    assert np.mean(1e3 * np.array(seconds) <= gaps.p99) == pytest.approx(0.99, abs=0.002)
    assert gaps.longest == 1e3 * max(seconds)


def test_store_and_plain_files_are_both_measured_and_removed(tmp_path: Path) -> None:
    page = PageShape(3, (16, 2, 8))
    rates = FileBench(tmp_path, page, 40 * page.nbytes, repeats=2).run()
    assert {"written", "written and flushed", "read from page cache"} <= {r.what for r in rates}
    assert all(min(r.store, r.raw, r.raw_one_file, r.ratio) > 0 for r in rates)
    assert {r.page_bytes for r in rates} == {3 * 16 * 2 * 8 * 4}
    assert not list((tmp_path / "plain").iterdir())
    assert not list((tmp_path / "cache").rglob("*.kv"))


def test_a_stuck_disk_keeps_its_writers_until_it_is_free(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    cache = DiskStore(tmp_path, Limits(1 << 20, None))
    blocks = cache.blocks("00" * 16, {})

    def write() -> WriteResult:
        return blocks.write(b"key", memoryview(b"payload"), 1e9, 0)

    with ThreadPoolExecutor(1) as thread:
        with stuck_disk():
            stuck = thread.submit(write)
            assert not stuck.done()
        assert stuck.result() is WriteResult.FAILED
    assert write() is WriteResult.STORED
    cache.close()
