# SPDX-License-Identifier: Apache-2.0
"""DiskStore keeps its limits, and a failing disk stops nothing."""

import errno
import json
import os
import stat
from datetime import datetime, timedelta

import pytest
from kv_transfer.disk import naive
from kv_transfer.disk.naive import blocks

from vllm_metal.identity.fingerprint import Fingerprint, PoolContent
from vllm_metal.kv_transfer.disk.ledger import Ledger, read_balance
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.space import WriteResult
from vllm_metal.kv_transfer.disk.store import DiskStore

#: Bytes that the file of `naive.block` counts for, and those of a ledger and a manifest.
ROOM = 8192
REST = 2 * 4096


def write(folder, number, used_at=None, depth=0):
    used_at = float(number) if used_at is None else used_at
    return folder.write(naive.key(number), naive.block(number), used_at, depth)


def read(folder, number):
    page = naive.blank(naive.block(number))
    if not folder.read(naive.key(number), page):
        return False
    assert page == naive.block(number)
    return True


def there(folder, numbers):
    return [number for number in numbers if read(folder, number)]


def test_a_restart_finds_all(make_cache):
    first = make_cache()
    folder = blocks(first)
    for number in range(5):
        assert write(folder, number) is WriteResult.STORED
    first.close()
    folder = blocks(make_cache())
    assert there(folder, range(6)) == [0, 1, 2, 3, 4]


def test_the_same_folder_is_the_same_object(make_cache):
    cache = make_cache()
    assert cache.blocks("ab", {}) is cache.blocks("ab", {})
    assert cache.blocks("ab", {}) is not cache.blocks("ab", {}, "tenant-1")


@pytest.mark.parametrize(
    ("fingerprint", "namespace"),
    [("../x", "shared"), ("AB", "shared"), ("ab", ".."), ("ab", "a/b")],
)
def test_names_that_are_none_are_refused(make_cache, fingerprint, namespace):
    with pytest.raises(ValueError, match="is no"):
        make_cache().blocks(fingerprint, {}, namespace)


def test_pages_of_all_namespaces_are_offered_but_for_those_of_other_content(make_cache, root):
    content = PoolContent(Fingerprint(naive.FINGERPRINT, naive.FACTS), (4000,))
    before = make_cache()
    for number, namespace in enumerate(("shared", "tenant-1")):
        write(before.blocks(naive.FINGERPRINT, naive.FACTS, namespace), number)
    write(before.blocks("cd", naive.FACTS), 2)
    before.close()
    cache = make_cache()
    cache.use(content)
    offered = cache.offered()
    keys = [naive.key(number) for number in range(5)]
    naive.wait_until(lambda: len(offered.find(keys)) == 2)
    write(cache.blocks(naive.FINGERPRINT, naive.FACTS, "tenant-2"), 3)
    assert offered.find(keys) == {naive.key(number) for number in (0, 1, 3)}
    for number in (0, 1, 3):
        assert offered.read(naive.key(number)) == naive.block(number)
    assert offered.read(naive.key(2)) is offered.read(naive.key(4)) is None
    (path,) = naive.files(root, f"*{naive.key(1).hex()}.kv")
    path.unlink()
    assert offered.read(naive.key(1)) is None
    assert offered.find(keys) == {naive.key(0), naive.key(3)}


def test_manifests_hold_the_facts(make_cache, root, tmp_path):
    cache = make_cache()
    cache.blocks("ab", {**naive.FACTS, "path": tmp_path})
    cache.blocks("cd", naive.FACTS)
    naive.wait_until(lambda: len(cache.manifests()) == 2)
    assert cache.manifests() == {"ab": {**naive.FACTS, "path": str(tmp_path)}, "cd": naive.FACTS}
    (root / "ab" / "manifest.json").write_text("{")
    assert cache.manifests().keys() == {"cd"}
    assert json.loads((root / "cd" / "manifest.json").read_text())["fingerprint"] == "cd"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_read(make_cache, root, umask):
    before = os.umask(umask)
    try:
        write(blocks(make_cache()), 1)
    finally:
        os.umask(before)
    found = [root, *root.rglob("*")]
    assert len(found) == 9
    for path in found:
        mode = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == mode, path


def test_a_file_is_private_from_its_first_moment(make_cache, root, monkeypatch):
    folder = blocks(make_cache())
    seen = []
    ftruncate = os.ftruncate

    def look(descriptor, size):
        seen.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return ftruncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", look)
    write(folder, 1)
    assert seen == [0o600]


def test_a_folder_of_something_else_is_refused(make_cache, root):
    root.mkdir()
    (root / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="prefix_cache_dir"):
        make_cache()
    assert os.listdir(root) == ["thesis.tex"]


def test_a_file_in_place_of_the_root_is_an_error(make_cache, root):
    root.write_text("")
    with pytest.raises(OSError):
        make_cache()


def test_a_folder_that_finder_has_seen_is_taken(make_cache, root):
    root.mkdir()
    (root / ".DS_Store").write_text("x")
    assert write(blocks(make_cache()), 1) is WriteResult.STORED


# Bytes


def test_the_limit_holds_at_every_write(make_cache, root):
    limit = REST + 10 * ROOM
    cache = make_cache(limit)
    folder = blocks(cache)
    for number in range(50):
        assert write(folder, number) is WriteResult.STORED
        assert naive.room(root) == cache.stats().bytes <= limit
    assert cache.stats().num_evicted == 50 - len(naive.files(root))
    assert len(naive.files(root)) >= 9


def test_eviction_goes_a_little_below_the_limit(make_cache):
    """5 % below it, three of forty blocks here, so that not every write scans."""
    cache = make_cache(REST + 40 * ROOM)
    folder = blocks(cache)
    evicted = []
    for number in range(45):
        write(folder, number)
        evicted.append(cache.stats().num_evicted)
    assert evicted[39:] == [0, 3, 3, 3, 6, 6]


def test_the_manifest_of_what_is_being_stored_stays(make_cache, root):
    cache = make_cache(REST + ROOM)
    folder = blocks(cache)
    for number in range(3):
        assert write(folder, number) is WriteResult.STORED
        assert cache.manifests().keys() == {naive.FINGERPRINT}
        assert cache.stats().bytes == naive.room(root) == REST + ROOM


def test_the_least_recently_used_go_first_and_heads_last(make_cache, root):
    """Of two prompts of five blocks, the older one's last blocks go first."""
    cache = make_cache(REST + 10 * ROOM)
    folder = blocks(cache)
    for depth in range(5):
        write(folder, depth, used_at=1000.0, depth=depth)
    for depth in range(5):
        write(folder, 10 + depth, used_at=2000.0, depth=depth)
    folder.touch([naive.key(number) for number in range(5)], used_at=3000.0)
    every = [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert there(folder, every) == every
    order = []
    number = 100
    while (left := there(folder, every)) and number < 120:
        write(folder, number, used_at=9000.0 + number)
        order += [gone for gone in reversed(left) if gone not in there(folder, every)]
        number += 1
    assert order == [14, 13, 12, 11, 10, 4, 3, 2, 1, 0]


def test_eviction_goes_across_fingerprints_and_namespaces(make_cache, root):
    cache = make_cache(4096 * 4 + 6 * ROOM)
    folders = [blocks(cache, "aa"), blocks(cache, "bb"), blocks(cache, "bb", "tenant-1")]
    for used, folder in enumerate(folders):
        write(folder, used, used_at=100.0 + used)
        write(folder, used + 10, used_at=200.0 + used)
    write(folders[2], 30, used_at=300.0)
    assert there(folders[0], [0, 10]) == [10]
    for number in range(31, 60):
        write(folders[2], number, used_at=300.0 + number)
    assert not there(folders[0], [0, 10])
    assert not (root / "aa").exists()
    assert cache.manifests().keys() == {"bb"}
    assert cache.stats().bytes == naive.room(root)


def test_a_fingerprint_that_was_evicted_comes_back(make_cache, root):
    cache = make_cache(4096 * 3 + 4 * ROOM)
    one, two = blocks(cache, "aa"), blocks(cache, "bb")
    write(one, 1)
    for number in range(10, 20):
        write(two, number)
    assert not (root / "aa").exists()
    assert not one.contains(naive.key(1))
    assert write(one, 2, used_at=99.0) is WriteResult.STORED
    assert read(one, 2)
    assert "aa" in cache.manifests()


def test_a_block_larger_than_the_limit_evicts_nothing(make_cache, root):
    cache = make_cache(REST + 3 * ROOM)
    folder = blocks(cache)
    write(folder, 1)
    large = memoryview(bytes(4 * ROOM))
    assert folder.write(naive.key(2), large, 5.0, 0) is WriteResult.NO_ROOM
    assert read(folder, 1)
    assert cache.stats().num_refused["no_room"] == 1


def test_files_of_others_count_and_stay(make_cache, root, clock):
    cache = make_cache(REST + 4 * ROOM)
    folder = blocks(cache)
    write(folder, 1)
    (root / "theirs").mkdir()
    (root / "theirs" / "file").write_bytes(bytes(3 * ROOM + 1))
    (root / "theirs" / "a.kv.1-00000000.1.tmp").write_text("")
    folder.discard([naive.key(1)])
    other = blocks(make_cache(REST + 4 * ROOM))
    assert write(other, 1) is WriteResult.NO_ROOM
    assert {path.name for path in (root / "theirs").iterdir()} == {
        "file",
        "a.kv.1-00000000.1.tmp",
    }
    (root / "theirs" / "file").unlink()
    clock.now += 11
    assert write(other, 1) is WriteResult.STORED


def test_a_lower_limit_holds_after_the_start(make_cache, root):
    cache = make_cache()
    folder = blocks(cache)
    for number in range(20):
        write(folder, number)
    cache.close()
    lower = make_cache(REST + 5 * ROOM)
    naive.wait_until(lambda: naive.room(root) <= REST + 5 * ROOM)
    assert there(blocks(lower), range(20))[-1] == 19


@pytest.mark.parametrize("damage", ["removed", "emptied", "too low", "too high"])
def test_a_start_corrects_the_ledger(make_cache, root, damage):
    cache = make_cache()
    folder = blocks(cache)
    for number in range(5):
        write(folder, number)
    cache.close()
    if damage == "removed":
        (root / "ledger").unlink()
    elif damage == "emptied":
        os.truncate(root / "ledger", 0)
    else:
        ledger = Ledger(root)
        with ledger.locked() as balance:
            ledger.write_balance(balance.plus(-(10**9) if damage == "too low" else 10**9))
        ledger.close()
    cache = make_cache(REST + 5 * ROOM)
    naive.wait_until(lambda: cache.stats().bytes == naive.room(root))
    write(blocks(cache), 6)
    assert cache.stats().bytes == naive.room(root) <= REST + 5 * ROOM


def test_a_root_that_is_removed_under_an_engine_is_made_again(make_cache, root):
    folder = blocks(cache := make_cache())
    write(folder, 1)
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    assert not read(folder, 1)
    assert write(folder, 1) is WriteResult.STORED
    assert read(folder, 1)
    assert cache.stats().bytes == naive.room(root)


# The daily budget


def test_writes_stop_at_the_budget_and_reads_go_on(make_cache, clock, log, root):
    cache = make_cache(daily=4096 + 3 * ROOM)  # a manifest, and three blocks
    folder = blocks(cache)
    outcomes = [write(folder, number) for number in range(6)]
    assert outcomes == [WriteResult.STORED] * 3 + [WriteResult.OVER_BUDGET] * 3
    assert there(folder, range(6)) == [0, 1, 2]
    assert cache.stats().num_refused["over_budget"] == 3
    assert cache.stats().written_today == 4096 + 3 * ROOM
    assert log.text.count("prefix_cache_daily_writes") == 1
    assert not naive.files(root, "*.tmp")

    midnight = datetime.fromtimestamp(clock.now).replace(hour=0, minute=0) + timedelta(days=1)
    clock.now = midnight.timestamp() - 1
    assert write(folder, 3) is WriteResult.OVER_BUDGET
    clock.now = midnight.timestamp() + 1
    assert cache.stats().written_today == 0
    assert [write(folder, number) for number in range(3, 8)] == [WriteResult.STORED] * 3 + [
        WriteResult.OVER_BUDGET
    ] * 2
    assert log.text.count("prefix_cache_daily_writes") == 2


def test_all_engines_share_the_budget_and_restarts_keep_it(make_cache):
    one, two = make_cache(daily=4096 + 3 * ROOM), make_cache(daily=4096 + 3 * ROOM)
    assert write(blocks(one), 1) is WriteResult.STORED
    assert write(blocks(two), 2) is WriteResult.STORED
    one.close()
    three = blocks(make_cache(daily=4096 + 3 * ROOM))
    assert write(three, 3) is WriteResult.STORED
    assert write(three, 4) is WriteResult.OVER_BUDGET
    assert write(blocks(two), 5) is WriteResult.OVER_BUDGET


def test_a_clock_that_was_wrong_does_not_stop_writes_for_ever(make_cache, clock):
    folder = blocks(make_cache(daily=4096 + ROOM))
    right = clock.now
    clock.now += 400 * 86400
    assert write(folder, 1) is WriteResult.STORED
    assert write(folder, 2) is WriteResult.OVER_BUDGET
    clock.now = right
    assert write(folder, 2) is WriteResult.STORED


# A disk that fails


def fail(number):
    def failing(*_, **__):
        raise OSError(number, os.strerror(number))

    return failing


FAILING = {
    "ftruncate": errno.ENOSPC,
    "pwritev": errno.EIO,
    "rename": errno.EROFS,
    "utime": errno.EDQUOT,
}


@pytest.mark.parametrize(
    ("call", "number"),
    [
        *FAILING.items(),
        *(
            pytest.param(call, number, marks=pytest.mark.slow)
            for call in FAILING
            for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
            if FAILING[call] != number
        ),
    ],
)
def test_a_disk_that_fails_leaves_nothing_and_pauses_writes(
    make_cache, root, clock, log, monkeypatch, call, number
):
    cache = make_cache()
    folder = blocks(cache)
    write(folder, 1)
    before = cache.stats().bytes
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(number))
        assert write(folder, 2) is WriteResult.FAILED
    assert not naive.files(root, "*.tmp")
    assert cache.stats().bytes == before == naive.room(root)
    assert write(folder, 2) is WriteResult.FAILED
    assert write(folder, 3) is WriteResult.FAILED
    assert read(folder, 1)
    assert log.text.count("has stopped storing blocks") == 1
    assert os.strerror(number) in log.text
    assert cache.stats().num_refused == {"over_budget": 0, "no_room": 0, "failed": 1, "paused": 2}
    clock.now += 59
    assert write(folder, 2) is WriteResult.FAILED
    clock.now += 2
    assert write(folder, 2) is WriteResult.STORED
    assert read(folder, 2)


def test_a_disk_that_is_full_in_the_middle_of_a_block(make_cache, root, monkeypatch):
    cache = make_cache()
    folder = blocks(cache)
    pwritev = os.pwritev
    calls = []

    def short_then_full(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(descriptor, [buffers[0][:50]], offset)

    monkeypatch.setattr(os, "pwritev", short_then_full)
    assert write(folder, 1) is WriteResult.FAILED
    assert len(calls) == 4
    assert not naive.files(root, "*.tmp")
    assert not folder.contains(naive.key(1))
    assert cache.stats().bytes == naive.room(root)


def test_one_warning_while_a_disk_stays_full(make_cache, clock, log, monkeypatch):
    folder = blocks(make_cache())
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", fail(errno.ENOSPC))
        for number in range(5):
            write(folder, number)
            clock.now += 61
    assert log.text.count("has stopped storing blocks") == 1
    assert write(folder, 9) is WriteResult.STORED
    monkeypatch.setattr(os, "ftruncate", fail(errno.ENOSPC))
    write(folder, 10)
    assert log.text.count("has stopped storing blocks") == 2


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_root_that_can_only_be_read(make_cache, root, log, monkeypatch, number):
    folder = blocks(make_cache())
    write(folder, 1)
    write(folder, 2)
    before = sorted(root.rglob("*"))
    opened = os.open

    def read_only(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(number, os.strerror(number))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    for call in ("unlink", "mkdir", "rename", "utime", "rmdir"):
        monkeypatch.setattr(os, call, fail(number))
    cache = make_cache()
    folder = cache.blocks(naive.FINGERPRINT, naive.FACTS)
    assert there(folder, [1, 2]) == [1, 2]
    assert [write(folder, number) for number in (3, 4)] == [WriteResult.FAILED] * 2
    assert write(folder, 1) is WriteResult.PRESENT
    folder.touch([naive.key(1)], 1.0)
    folder.discard([naive.key(1)])
    assert log.text.count("has stopped storing blocks") == 1
    assert "writable" in log.text
    assert sorted(root.rglob("*")) == before
    cache.close()
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_whose_mode_forbids_writing(make_cache, root):
    folder = blocks(make_cache())
    write(folder, 1)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    folder = make_cache().blocks(naive.FINGERPRINT, naive.FACTS)
    assert read(folder, 1)
    assert write(folder, 2) is WriteResult.FAILED
    for path in [root, *root.rglob("*")]:
        path.chmod(0o700 if path.is_dir() else 0o600)


def test_an_engine_that_holds_the_lock_for_ever_stops_no_read(make_cache, root, monkeypatch):
    folder = blocks(make_cache())
    write(folder, 1)
    ledger = Ledger(root)
    with ledger.locked():
        monkeypatch.setattr("vllm_metal.kv_transfer.disk.ledger.LOCK_TIMEOUT", 0.05)
        assert write(folder, 2) is WriteResult.FAILED
        assert read(folder, 1)
    ledger.close()


def test_after_close_writes_are_refused_and_nothing_is_left(make_cache, root):
    cache = make_cache()
    folder = blocks(cache)
    write(folder, 1)
    cache.close()
    assert write(folder, 2) is WriteResult.FAILED
    assert read(folder, 1)
    assert not list((root / "engines").iterdir())
    assert read_balance(root).bytes == naive.room(root)
    cache.close()


def test_temporaries_of_dead_engines_go_and_those_of_living_ones_stay(make_cache, root):
    cache = make_cache()
    write(blocks(cache), 1)
    (path,) = naive.files(root)
    (name,) = os.listdir(root / "engines")
    alive = path.with_name(f"{path.name}.{name}.7.tmp")
    dead = path.with_name(f"{path.name}.{os.getpid()}-00000000.7.tmp")
    alive.write_bytes(bytes(10))
    dead.write_bytes(bytes(10))
    other = make_cache()
    naive.wait_until(lambda: not dead.exists())
    assert alive.exists()
    naive.wait_until(lambda: other.stats().bytes == naive.room(root))


def test_a_cache_needs_no_clock(root):
    cache = DiskStore(root, Limits(10**6, None))
    assert write(blocks(cache), 1) is WriteResult.STORED
    cache.close()
