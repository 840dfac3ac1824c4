# SPDX-License-Identifier: Apache-2.0
"""Random traffic through vLLM's scheduler, the connector, the hooks and a real disk cache.

The model's K/V are a hash of the text: `traffic.Runner` checks every block that a request reads.
"""

import time
from threading import Event

import numpy as np
import pytest
from kv_transfer.traffic import (
    BLOCK,
    FAILS_ON_DEVICE,
    GOOD,
    RAISES_IN_FORWARD,
    RAISES_IN_SAMPLE,
    Engine,
    engine_config,
    prompts,
)
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_metal.device import mlx_device
from vllm_metal.kv_transfer.disk.block_folder import BlockFolder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Speeds up failing steps, which collect garbage over all of this process's objects."""
    monkeypatch.setattr(mlx_device, "give_back", lambda: None)


@pytest.fixture
def make(tmp_path):
    made = []

    def make_engine(num_groups=1, ahead=True, num_blocks=40, **options):
        config = engine_config(tmp_path, tmp_path / "cache", async_scheduling=ahead)
        made.append(Engine(config, tmp_path / "cache", num_blocks, num_groups, **options))
        return made[-1]

    yield make_engine
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    ("num_groups", "ahead"),
    [
        *((1, True), (2, False)),
        *(pytest.param(*case, marks=pytest.mark.more) for case in ((1, False), (2, True))),
    ],
)
def test_a_second_engine_finds_what_the_first_one_left(make, num_groups, ahead):
    first = make(num_groups, ahead)
    prompt = list(range(90)) * 2
    first.generate(prompt, max_tokens=30)
    first.check()
    first.close()
    assert first.check_disk() >= 13
    second = make(num_groups, ahead)
    second.generate(prompt, max_tokens=30)
    second.check()
    assert second.counter("num_read") >= 10


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.more)])
def test_loads_that_hold_all_blocks_do_not_wait_for_each_other_for_ever(
    make, tmp_path, monkeypatch, ahead
):
    """vLLM reserves blocks for the rest of a load, and too few with windows."""
    texts = [list(range(start, start + 50)) * 2 for start in (0, 40)]
    texts[1] += texts[1][:16]
    first = make()
    for text in texts:
        first.generate(text, max_tokens=2)
    first.close()
    monkeypatch.setattr(Scheduler, "_inflight_prefill_reserved_blocks", lambda self: 0)
    config = engine_config(
        tmp_path, tmp_path / "cache", async_scheduling=ahead, scheduler_reserve_full_isl=False
    )
    engine = Engine(config, tmp_path / "cache", 6 + 7 + 1, 1)
    added = {engine.add(text, max_tokens=20) for text in texts}
    ends = time.monotonic() + 60
    while not added <= set(engine.ended):
        assert time.monotonic() < ends
        engine.step()
    engine.run()
    engine.check()
    engine.close()
    assert engine.counter("num_read") >= 13


def test_a_request_that_starts_again_beside_a_disk_that_hangs_computes(make, monkeypatch):
    engine, goes_on = make(), Event()
    write = BlockFolder.write

    def hanging(self, *arguments, **options):
        goes_on.wait()
        return write(self, *arguments, **options)

    monkeypatch.setattr(BlockFolder, "write", hanging)
    try:
        req_id = engine.add(list(range(90)) * 2, max_tokens=60)
        while not engine.hooks.store_jobs.staged_bytes:
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        ends = time.monotonic() + 60
        while req_id not in engine.ended:
            assert time.monotonic() < ends
            engine.step()
    finally:
        goes_on.set()
    engine.run()
    engine.check()


def play(engine, seed, num_actions):
    """Plays random requests, aborts, resets, failing steps, NaN, and corrupt files."""
    rng = np.random.default_rng(seed)
    texts = prompts(np.random.default_rng(seed % 3))
    failures = [0]

    def fate():
        fails = rng.random() < 0.04 and failures[0] < 2
        failures[0] = failures[0] + 1 if fails else 0
        kinds = [RAISES_IN_FORWARD, RAISES_IN_SAMPLE, FAILS_ON_DEVICE]
        return kinds[int(rng.integers(3))] if fails else GOOD

    engine.fate = fate
    for _ in range(num_actions):
        action, live = rng.random(), sorted(engine.scheduler.requests)
        if action < 0.25 and len(live) < 12:
            engine.add(next(texts), max_tokens=int(rng.integers(1, 60)))
        elif action < 0.28 and live:
            engine.abort(live[int(rng.integers(len(live)))])
        elif action < 0.30:
            engine.scheduler.reset_prefix_cache(True, bool(rng.integers(2)))
        elif action < 0.31 and live:
            engine.poisoned.add(live[int(rng.integers(len(live)))])
        elif action < 0.33:
            spoil(engine, rng)
        elif action < 0.34:
            time.sleep(0.003)
        else:
            engine.step()
    engine.fate = lambda: GOOD
    engine.run()


def spoil(engine, rng):
    """Changes or deletes a file of the cache."""
    files = sorted(engine.folder.glob("*/*/*/*.kv"))
    if files:
        path = files[int(rng.integers(len(files)))]
        if rng.integers(2):
            path.unlink(missing_ok=True)
        else:
            try:
                with path.open("r+b") as file:
                    file.seek(-1, 2)
                    last = file.read(1)
                    file.seek(-1, 2)
                    file.write(bytes([last[0] ^ 1]))
            except FileNotFoundError:
                pass


@pytest.mark.parametrize(
    ("seed", "num_actions"),
    [
        *((0, 120), (3, 120)),
        *(pytest.param(seed, 250, marks=pytest.mark.more) for seed in (1, 2)),
        *(pytest.param(seed, 250, marks=pytest.mark.slow) for seed in (0, 3, 4, 5, 6, 7)),
    ],
)
def test_no_request_reads_a_wrong_block_and_none_is_kept(make, seed, num_actions):
    num_groups, ahead = 1 + seed % 2, seed % 4 < 2
    engines = []
    for half in range(2):
        engines.append(make(num_groups, ahead, num_blocks=30 + 15 * num_groups))
        play(engines[-1], seed * 2 + half, num_actions)
        engines[-1].check()
        engines[-1].close()
    assert engines[0].check_disk(*engines) > 10
    assert engines[1].counter("num_read") > 0


@pytest.mark.parametrize(
    "seed", [22, *(pytest.param(seed, marks=pytest.mark.more) for seed in (68, 101, 102))]
)
def test_a_request_that_ends_while_it_is_preempted_leaves_no_block_of_another(make, seed):
    """Its last token comes from a step in flight, as it loses its blocks to another request.

    With these seeds a pool that gave the blocks on before that step has ended had wrong pages.
    """
    rng = np.random.default_rng(seed)
    engine = make(num_blocks=14)
    engine.scheduler.reset_prefix_cache(True)  # must not change how blocks are freed later on
    for _ in range(12):
        length = int(rng.integers(10, 50))
        prompt = rng.integers(0, 90, length).tolist()
        engine.add(prompt, max_tokens=BLOCK * int(rng.integers(4, 7)) + 1 - length)
    engine.run()
    engine.check()
    engine.close()
    assert engine.check_disk() > 12


def test_a_request_that_loses_the_pool_may_load_in_the_step_that_tells_of_it(make):
    engine = make()
    prompt = list(range(80))
    engine.generate(prompt)
    engine.add(prompt, max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.scheduler.reset_prefix_cache(True)
    before = engine.counter("num_read")
    engine.run()
    engine.check()
    assert engine.counter("num_read") >= before + 5


def test_a_reset_of_all_caches_may_be_repeated_while_pages_are_written(make):
    engine = make()
    engine.add(list(range(90)), max_tokens=40)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(True, reset_connector=True)
    assert engine.scheduler.reset_prefix_cache(True, reset_connector=True)
    engine.run()
    engine.check()
    engine.close()
    assert engine.check_disk() >= 5


def test_a_file_that_cannot_be_read_now_delays_a_request_and_no_more(make, monkeypatch):
    engine = make()
    prompt = list(range(80))
    engine.generate(prompt)
    engine.scheduler.reset_prefix_cache(True)
    monkeypatch.setattr(BlockFolder, "read", lambda *_: False)  # out of file descriptors
    req_id = engine.generate(prompt)
    engine.check()
    assert "length" in engine.ended[req_id]


def test_pages_of_a_request_that_failed_are_not_found_even_before_they_are_gone(make):
    engine = make()
    prompt = list(range(80))
    engine.generate(prompt)
    hold = Event()
    engine.store.writer.submit(hold.wait, 120)
    failing = engine.add(prompt + [5] * 20, max_tokens=20)
    for _ in range(6):
        engine.step()
    engine.poisoned.add(failing)
    while failing not in engine.ended:
        engine.step()
    assert "error" in engine.ended[failing]
    before = engine.counter("num_read")
    engine.scheduler.reset_prefix_cache(True)
    again = engine.add(prompt)
    while again not in engine.ended:
        engine.step()
    assert engine.counter("num_read") == before
    hold.set()
    engine.run()
    engine.check()
    engine.close()
    engine.check_disk()


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.more)])
def test_blocks_that_a_failed_request_had_from_another_are_not_kept_once_they_are_cleared(
    make, ahead
):
    engine = make(ahead=ahead, num_blocks=60)
    engine.add([9] * 20, max_tokens=100)  # the engine has something to compute all the time
    for _ in range(20):
        engine.step()
    prompt = list(range(4, 84))
    first = engine.add(prompt, max_tokens=4)
    for _ in range(3):
        engine.step()
    failing = engine.add(prompt + [5] * 20, max_tokens=20)
    while first not in engine.ended:
        engine.step()
    assert engine.hooks.store_jobs.busy
    engine.poisoned.add(failing)
    while failing not in engine.ended:
        engine.step()
    engine.run()
    engine.check()
    engine.close()
    engine.check_disk()


@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=pytest.mark.more)])
def test_blocks_of_a_failed_request_are_cleared_while_a_step_in_flight_holds_them(make, ahead):
    engine = make(ahead=ahead)
    engine.add([9] * 20, max_tokens=60)
    failing = engine.add(list(range(80)), max_tokens=20)
    for _ in range(6):
        engine.step()
    engine.poisoned.add(failing)
    while failing not in engine.ended:
        engine.step()
    for _ in range(2):
        engine.step()
    assert not np.isnan(engine.runner.runner.pool.kv_np).any()
    engine.run()
    engine.check()
