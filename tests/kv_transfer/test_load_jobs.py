# SPDX-License-Identifier: Apache-2.0
"""Loads into the pool stay within limits, and write nothing after they end."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_transfer.small_pool import (
    PAGE_BYTES,
    SmallPool,
    all_ended,
    folder_of,
    held_up,
    keys_of,
    on_disk,
    store_on,
)

from vllm_metal.kv_transfer import load_jobs as module
from vllm_metal.kv_transfer.load_jobs import LoadJobs

NAMES = [f"p{index}" for index in range(8)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 2 * PAGE_BYTES)


def filled(folder):
    """A store with pages NAMES of group 0, the blocks 1 to 8 of a pool."""
    store, source = store_on(folder), SmallPool(seed=1)
    keys = keys_of(NAMES)
    for index, key in enumerate(keys.keys):
        content = memoryview(source.block(1 + index))
        folder_of(store).write(key, content, 1e9, index)
    assert None not in on_disk(store, keys)
    return store, source


@pytest.fixture
def disk(tmp_path):
    store, source = filled(tmp_path / "cache")
    yield store, source
    store.close()


@pytest.fixture
def pool():
    return SmallPool()


@pytest.fixture
def loads(disk, pool):
    made = LoadJobs(disk[0], 4 * PAGE_BYTES)
    made.use(pool.pages)
    yield made
    made.close()


def turn(loads, most_bytes=10**9):
    """Runs a step; returns what ended."""
    loads.start_reads()
    loads.import_ready(most_bytes)
    return loads.finished()


def finish(loads, *wanted):
    return all_ended(lambda: turn(loads), wanted)


@pytest.fixture
def held(monkeypatch):
    """A disk whose reads wait for an event."""
    yield from held_up(monkeypatch, "read")


def test_pages_come_to_their_blocks_bit_by_bit(disk, loads, pool):
    others = [pool.block(block) for block in (0, 1, 2)]
    blocks = [9, 3, 5, 4, 11, 7, 8, 10]
    loads.add(0, "r", keys_of(NAMES), blocks)
    (job,) = finish(loads, 0).values()
    assert (job.req_id, job.failed, job.num_bytes) == ("r", False, 8 * PAGE_BYTES)
    for index, block in enumerate(blocks):
        assert pool.block(block) == disk[1].block(1 + index)
    assert [pool.block(block) for block in (0, 1, 2)] == others
    assert loads.staged_bytes == 0


def test_a_step_takes_so_many_bytes_and_staging_is_bounded(loads, pool):
    loads.add(0, "r", keys_of(NAMES), range(1, 9))
    num_steps, deadline = 0, time.monotonic() + 60
    while loads.busy:
        assert time.monotonic() < deadline
        before = [pool.block(block) for block in range(1, 9)]
        ended = turn(loads, most_bytes=1)
        changed = sum(pool.block(1 + index) != held for index, held in enumerate(before))
        assert changed in (0, 2)  # one piece
        assert loads.staged_bytes <= 4 * PAGE_BYTES
        num_steps += changed > 0
    assert ended[0].num_bytes == 8 * PAGE_BYTES
    assert num_steps == 4


@pytest.mark.parametrize("spoiled", ["vanished", "changed"])
def test_one_bad_page_fails_the_load_and_the_request_may_load_again(
    disk, loads, pool, spoiled, tmp_path
):
    (path,) = (tmp_path / "cache").glob(f"*/*/*/{keys_of(NAMES).keys[5].hex()}.kv")
    if spoiled == "vanished":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    loads.add(0, "r", keys_of(NAMES), range(1, 9))
    assert finish(loads, 0)[0].failed
    loads.add(1, "r", keys_of(NAMES[:5]), range(1, 6))
    assert not finish(loads, 1)[1].failed
    assert [pool.block(block) for block in range(1, 6)] == [
        disk[1].block(block) for block in range(1, 6)
    ]


@pytest.mark.parametrize("how", ["cancel", "cancel after reading", "lose the pool"])
def test_a_load_that_was_taken_back_writes_nothing_any_more(loads, pool, held, how):
    before = [pool.block(block) for block in range(12)]
    loads.add(0, "r", keys_of(NAMES), range(1, 9))
    loads.start_reads()
    if how == "cancel after reading":
        held.set()
        while loads.num_ready < 2:
            loads.start_reads()
            time.sleep(0.001)
    if how == "lose the pool":
        loads.drop_pool()
        loads.use(pool.pages)
    else:
        loads.cancel({"r"})
    (job,) = loads.finished()
    assert not job.failed and job.req_id == "r"  # its blocks were taken away
    held.set()
    deadline = time.monotonic() + 60
    while not loads.is_quiet:
        assert time.monotonic() < deadline
        assert turn(loads) == []
    turn(loads)
    assert [pool.block(block) for block in range(12)] == before
    assert loads.staged_bytes == 0


def test_a_request_that_loads_again_at_once_gets_its_second_load_only(disk, loads, pool, held):
    before = [pool.block(block) for block in range(5, 9)]
    loads.add(0, "r", keys_of(NAMES[:4]), range(5, 9))
    loads.start_reads()
    loads.cancel({"r"})
    loads.add(1, "r", keys_of(NAMES[4:]), range(1, 5))
    held.set()
    ended = finish(loads, 0, 1)
    assert not ended[0].failed and not ended[1].failed
    assert [pool.block(b) for b in range(1, 5)] == [disk[1].block(b) for b in range(5, 9)]
    assert [pool.block(block) for block in range(5, 9)] == before


ACTIONS = ["add", "add", "turn", "turn", "cancel", "spoil", "lose", "import fails"]


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 30)), max_size=25))
@settings(max_examples=20)
def test_whatever_happens_each_job_ends_once_and_no_memory_is_held(tmp_path_factory, actions):
    store, _ = filled(tmp_path_factory.mktemp("cache"))
    loads, pool, added, ended = LoadJobs(store, 4 * PAGE_BYTES), SmallPool(), [], []
    loads.use(pool.pages)

    def lose():
        loads.drop_pool()
        loads.use(pool.pages)

    for action, number in actions:
        req_id = f"r{number % 4}"
        if action == "add" and req_id not in loads.req_ids:
            count = number % 9
            loads.add(len(added), req_id, keys_of(NAMES[:count]), range(1, 1 + count))
            added.append(len(added))
        elif action == "turn":
            turned = turn(loads, most_bytes=number * PAGE_BYTES)
            ended += turned
        elif action == "cancel":
            loads.cancel({req_id})
        elif action == "spoil":
            folder_of(store).discard(keys_of(NAMES).keys[number % 8 : number % 8 + 1])
        elif action == "lose":
            lose()
        elif action == "import fails":
            pool.pages.import_pages = None
            try:
                loads.import_ready(10**9)
            except TypeError:
                lose()
            del pool.pages.import_pages
        assert loads.staged_bytes <= 4 * PAGE_BYTES
    deadline = time.monotonic() + 60
    while not loads.is_quiet:
        assert time.monotonic() < deadline
        ended += turn(loads)
    ended += turn(loads)
    assert sorted(job.job_id for job in ended) == added
    assert loads.staged_bytes == 0
    loads.close()
    store.close()


def test_closing_with_loads_queued_does_not_hang(disk, pool, held):
    loads = LoadJobs(disk[0], 100 * PAGE_BYTES)
    loads.use(pool.pages)
    loads.add(0, "r", keys_of(NAMES), range(1, 9))
    loads.start_reads()
    loads.drop_pool()
    held.set()
    loads.close()
    assert [job.job_id for job in loads.finished()] == [0]
