# SPDX-License-Identifier: Apache-2.0
"""BlockFolder returns a block unchanged, or not at all."""

import errno
import os
import threading

import pytest
from kv_transfer.disk import naive

from vllm_metal.kv_transfer.disk.space import WriteResult

KEY = naive.key(7)
PAGE = naive.block(7)


@pytest.fixture
def cache(make_cache):
    return make_cache()


@pytest.fixture
def folder(cache):
    return naive.blocks(cache)


def write(folder, number, used_at=1000.0, depth=0):
    return folder.write(naive.key(number), naive.block(number), used_at, depth)


def read(folder, number):
    """Returns the block; None for a miss."""
    page = naive.blank(naive.block(number))
    return page if folder.read(naive.key(number), page) else None


def file_of(root, number, namespace="shared"):
    (found,) = (root / naive.FINGERPRINT / namespace).rglob(f"{naive.key(number).hex()}.kv")
    return found


def test_a_block_comes_back(folder, cache):
    assert not folder.contains(KEY)
    assert read(folder, 7) is None
    assert write(folder, 7) is WriteResult.STORED
    assert folder.contains(KEY)
    assert read(folder, 7) == PAGE
    stats = cache.stats()
    assert (stats.num_written, stats.num_read, stats.num_corrupt) == (1, 1, 0)
    assert stats.written_bytes == stats.read_bytes == 128 + 4000


def test_a_block_is_written_once(folder, root, cache):
    write(folder, 7)
    before = file_of(root, 7).stat()
    assert write(folder, 7) is WriteResult.PRESENT
    assert file_of(root, 7).stat() == before
    assert cache.stats().num_written == 1


def test_threads_that_race_write_one_file(folder, cache, root, monkeypatch):
    calls = []
    pwritev = os.pwritev

    def slow(descriptor, buffers, offset):
        calls.append(descriptor)
        racing.wait(0.2)  # time for the others to start
        return pwritev(descriptor, buffers, offset)

    racing = threading.Event()
    monkeypatch.setattr(os, "pwritev", slow)
    outcomes = []
    threads = [threading.Thread(target=lambda: outcomes.append(write(folder, 7))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcome.name for outcome in outcomes) == ["PRESENT"] * 7 + ["STORED"]
    assert len(calls) == 1
    assert cache.stats().bytes == naive.room(root)


def test_a_thread_that_waited_for_a_failed_write_writes_itself(folder, monkeypatch, clock):
    pwritev = os.pwritev
    entered, second = threading.Event(), threading.Event()

    def fails_once(descriptor, buffers, offset):
        monkeypatch.setattr(os, "pwritev", pwritev)
        entered.set()
        second.wait(60)
        raise MemoryError

    monkeypatch.setattr(os, "pwritev", fails_once)
    outcomes = []
    first = threading.Thread(target=lambda: outcomes.append(write(folder, 7)))
    first.start()
    entered.wait(60)
    other = threading.Thread(target=lambda: outcomes.append(write(folder, 7)))
    other.start()
    second.set()
    first.join()
    other.join()
    assert {outcome.name for outcome in outcomes} == {"FAILED", "STORED"}
    assert read(folder, 7) is not None


def test_what_another_engine_wrote_is_found(folder, make_cache):
    other = make_cache().blocks(naive.FINGERPRINT, naive.FACTS)
    assert not folder.contains(KEY)
    assert write(other, 7) is WriteResult.STORED
    assert folder.contains(KEY)
    assert read(folder, 7) == PAGE
    assert write(folder, 7) is WriteResult.PRESENT


def test_another_engine_that_is_faster_wins(folder, make_cache, root, monkeypatch):
    """Both find nothing and write; one file remains and is counted once."""
    cache = make_cache()
    other = naive.blocks(cache)
    pwritev = os.pwritev

    def while_other_writes(*args):
        monkeypatch.setattr(os, "pwritev", pwritev)
        assert write(other, 7) is WriteResult.STORED
        return pwritev(*args)

    monkeypatch.setattr(os, "pwritev", while_other_writes)
    assert write(folder, 7) is WriteResult.PRESENT
    assert len(naive.files(root)) == 1
    assert not naive.files(root, "*.tmp")
    assert cache.stats().bytes == naive.room(root)


def test_the_index_is_loaded_from_disk(folder, make_cache, monkeypatch):
    for number in range(20):
        write(folder, number)
    later = make_cache().blocks(naive.FINGERPRINT, naive.FACTS)
    asked = []
    exists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: asked.append(path) or exists(path))

    def known_without_asking():
        asked.clear()
        return all(later.contains(naive.key(number)) for number in range(20)) and not asked

    naive.wait_until(known_without_asking)


def test_a_hit_asks_the_file_system_for_nothing_and_a_miss_once(folder, monkeypatch):
    write(folder, 7)
    asked = []
    exists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: asked.append(path) or exists(path))
    assert folder.contains(KEY)
    assert not asked
    assert not folder.contains(naive.key(8))
    assert len(asked) == 1


def test_a_vanished_file_is_a_miss(folder, root, cache):
    write(folder, 7)
    file_of(root, 7).unlink()
    assert read(folder, 7) is None
    assert not folder.contains(KEY)
    assert (cache.stats().num_vanished, cache.stats().num_corrupt) == (1, 0)
    assert write(folder, 7) is WriteResult.STORED


def damage_truncate(path):
    os.truncate(path, 100)


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)


def damage_empty(path):
    path.write_bytes(b"")


def damage_lengthen(path):
    with path.open("ab") as file:
        file.write(b"\0")


def damage_replace_by_link(path):
    path.unlink()
    path.symlink_to(path.parent)


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_flip, damage_empty, damage_lengthen, damage_replace_by_link],
)
def test_a_bad_file_is_a_miss_and_removed(folder, root, cache, damage):
    write(folder, 7)
    damage(path := file_of(root, 7))
    assert read(folder, 7) is None
    assert not os.path.lexists(path)
    assert not folder.contains(KEY)
    assert cache.stats().num_corrupt == 1
    assert write(folder, 7) is WriteResult.STORED
    assert read(folder, 7) == PAGE


def test_a_block_that_goes_while_its_folder_is_listed_is_forgotten(make_cache, root, monkeypatch):
    write(naive.blocks(first := make_cache()), 7)
    first.close()
    listdir = os.listdir
    removals = []

    def list_and_remove(path):
        names = listdir(path)
        if file_of(root, 7).name in names:
            removal = threading.Thread(target=lambda: folder.discard([KEY]))
            removals.append(removal)
            removal.start()
            removal.join(0.2)  # it may have to wait until the names are entered
        return names

    cache = make_cache()
    folder = naive.blocks(cache)
    cache.close()  # waits until the folder is listed
    monkeypatch.setattr(os, "listdir", list_and_remove)
    folder.listing.load(lambda: False)
    (removal,) = removals
    removal.join()
    assert not folder.contains(KEY)
    assert read(folder, 7) is None


def test_files_that_swapped_names_are_bad(folder, root, cache):
    write(folder, 7)
    write(folder, 8)
    one, two = file_of(root, 7), file_of(root, 8)
    one.rename(root / "aside")
    two.rename(one)
    (root / "aside").rename(two)
    assert read(folder, 7) is None
    assert read(folder, 8) is None
    assert cache.stats().num_corrupt == 2


def test_a_file_of_another_namespace_is_bad(cache, root):
    shared = cache.blocks(naive.FINGERPRINT, naive.FACTS)
    tenant = cache.blocks(naive.FINGERPRINT, naive.FACTS, "tenant-0a")
    write(shared, 7)
    assert not tenant.contains(KEY)
    write(tenant, 7)
    file_of(root, 7).rename(file_of(root, 7, "tenant-0a"))
    assert read(tenant, 7) is None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EPERM])
def test_an_unreadable_file_is_a_miss_and_removed(folder, root, cache, monkeypatch, number):
    write(folder, 7)

    def unreadable(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", unreadable)
        assert read(folder, 7) is None
    assert not naive.files(root)
    assert cache.stats().num_corrupt == 1


def test_a_process_short_of_descriptors_removes_nothing(folder, cache, monkeypatch):
    write(folder, 7)

    def short(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", short)
        assert read(folder, 7) is None
    assert cache.stats().num_corrupt == 0
    assert read(folder, 7) == PAGE


def test_a_good_file_that_took_the_place_of_a_bad_one_stays(folder, root, monkeypatch):
    write(folder, 7)
    path = file_of(root, 7)
    good = path.read_bytes()
    damage_flip(path)
    preadv = os.preadv

    def replaced_meanwhile(*args):
        got = preadv(*args)
        (root / "aside").write_bytes(good)
        (root / "aside").rename(path)
        return got

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", replaced_meanwhile)
        assert read(folder, 7) is None
    assert read(folder, 7) == PAGE


def test_a_bad_file_that_cannot_be_removed_is_read_once(folder, root, cache, monkeypatch):
    write(folder, 7)
    damage_flip(file_of(root, 7))

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", read_only)
        assert read(folder, 7) is None
        assert not folder.contains(KEY)
        assert read(folder, 7) is None
    assert cache.stats().num_corrupt == 1


def test_discarded_blocks_are_gone(folder, root, cache):
    for number in range(3):
        write(folder, number)
    folder.discard([naive.key(0), naive.key(2), naive.key(99)])
    assert [folder.contains(naive.key(number)) for number in range(3)] == [False, True, False]
    assert len(naive.files(root)) == 1
    assert cache.stats().bytes == naive.room(root)


def test_a_blocks_mtime_is_its_last_use_and_its_depth(folder, root):
    write(folder, 1, used_at=5000.25, depth=3)
    assert file_of(root, 1).stat().st_mtime_ns == 5_000_250_000_000 - 3000
    write(folder, 2)
    folder.touch([naive.key(1), naive.key(9), naive.key(2)], used_at=6000.0, first_depth=10)
    assert file_of(root, 1).stat().st_mtime_ns == 6_000_000_000_000 - 10_000
    assert file_of(root, 2).stat().st_mtime_ns == 6_000_000_000_000 - 12_000


def test_touching_what_is_gone_forgets_it(folder, root):
    write(folder, 7)
    file_of(root, 7).unlink()
    folder.touch([KEY], 6000.0)
    assert not folder.contains(KEY)


@pytest.mark.parametrize(
    "call",
    [
        lambda folder: folder.write(b"k" * 65, PAGE, 0.0, 0) is WriteResult.FAILED,
        lambda folder: folder.write(b"", PAGE, 0.0, 0) is WriteResult.FAILED,
        lambda folder: folder.write(KEY, PAGE, float("nan"), 0) is WriteResult.FAILED,
        lambda folder: folder.write(KEY, PAGE[::2], 0.0, 0) is WriteResult.FAILED,
        lambda folder: folder.read(KEY, naive.blank(PAGE)[::2]) is False,
        lambda folder: folder.read(b"k" * 65, naive.blank(PAGE)) is False,
        lambda folder: folder.touch([KEY, b"k" * 65], float("inf")) is None,
        lambda folder: folder.discard([b"k" * 200]) is None,
        lambda folder: folder.contains(b"k" * 200) is False,
    ],
)
def test_bad_arguments_raise_nothing(folder, call, root):
    assert call(folder)
    assert not naive.files(root)
    assert not naive.files(root, "*.tmp")


def test_logs_name_no_key_and_no_path_below_the_root(folder, root, log, monkeypatch):
    write(folder, 7)
    write(folder, 8)
    damage_flip(file_of(root, 7))
    read(folder, 7)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error", str(file_of(root, 8)))

    monkeypatch.setattr(os, "ftruncate", fails)
    write(folder, 9)
    assert str(root) in log.text
    for secret in (naive.FINGERPRINT, naive.key(7).hex(), naive.key(8).hex(), naive.key(9).hex()):
        assert secret not in log.text
