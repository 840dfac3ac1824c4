# SPDX-License-Identifier: Apache-2.0
"""Corrupt files and failing disks: requests recompute missing blocks, and none fails."""

import errno
import os
import shutil
import threading
import time

import pytest
from e2e.disk import (
    ask,
    check_same,
    disk_engine,
    disk_hits,
    pages,
    random_prompts,
)
from e2e.fuzz.models import VOCAB
from e2e.harness import counters, run_out

from vllm_metal.kv_transfer.disk.block_folder import BlockFolder

CORRUPT = "vllm:prefix_cache_disk_corrupt"
LENGTH = 200
BLOCKS = LENGTH // 16


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    os.truncate(path, 0)


def lengthen(path):
    with path.open("ab") as file:
        file.write(b"\0")


def flip(place):
    def flip_bit(path):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return flip_bit


def vanish(path):
    path.unlink()


def swap(path):
    """Replaces this block file by another block's."""
    other = next(p for p in pages(path.parents[3]) if p != path)
    path.write_bytes(other.read_bytes())


def folder(path):
    path.unlink()
    path.mkdir()


def link_to_itself(path):
    path.unlink()
    path.symlink_to(path)


FAULTS = {
    "truncated": truncate,
    "empty": empty,
    "longer": lengthen,
    "bit of the header": flip(20),
    "bit of the checksum": flip(120),
    "first bit of K": flip(128),
    "last bit of V": flip(-1),
    "vanished": vanish,
    "another block's": swap,
    "a folder": folder,
    "a link to itself": link_to_itself,
}


@pytest.fixture(scope="module")
def cold(tiny, tmp_path_factory):
    """A folder with one prompt's blocks per fault, the prompts and their answers."""
    root = tmp_path_factory.mktemp("cold") / "cache"
    prompts = random_prompts([LENGTH] * len(FAULTS), VOCAB)
    answers, files = [], []
    with disk_engine(tiny, root) as llm:
        for prompt in prompts:
            known = set(pages(root))
            answers += ask(llm, [prompt])
            run_out(llm)
            wait_for_pages(llm, root, len(known) + BLOCKS)
            files.append(
                sorted(set(pages(root)) - known, key=lambda path: (-path.stat().st_mtime_ns, path))
            )
    return root, prompts, answers, files


def wait_for_pages(llm, root, number):
    deadline = time.monotonic() + 240
    while len(pages(root)) < number:
        assert time.monotonic() < deadline
        run_out(llm)


@pytest.fixture
def copied(cold, tmp_path):
    """A copy of the folder for this test."""
    root, prompts, answers, files = cold
    shutil.copytree(root, tmp_path / "cache", copy_function=shutil.copy2)
    moved = [[tmp_path / "cache" / path.relative_to(root) for path in some] for some in files]
    return tmp_path / "cache", prompts, answers, moved


def test_bad_files_are_found_and_written_again(tiny, copied):
    root, prompts, answers, files = copied
    for fault, some in zip(FAULTS.values(), files, strict=True):
        fault(some[len(some) // 2])
    with disk_engine(tiny, root) as llm:
        found = ask(llm, prompts)
        check_same(found, answers)
        run_out(llm)
        figures = counters(llm)
        # A file that is gone is a miss, not a bad file.
        assert figures[CORRUPT] == len(FAULTS) - 1
    with disk_engine(tiny, root) as llm:
        again = ask(llm, prompts)
        check_same(again, answers)
        repaired = [answer.cached for answer in again]
        unmendable = list(FAULTS).index("a folder")
        del repaired[unmendable]
        assert repaired == [BLOCKS * 16] * len(repaired)
        assert CORRUPT not in counters(llm) or counters(llm)[CORRUPT] <= 1


def test_files_go_bad_while_they_are_loaded(tiny, copied, monkeypatch):
    root, prompts, answers, files = copied
    read, damage = BlockFolder.read, {}
    for fault, some in zip(FAULTS.values(), files, strict=True):
        damage[some[-2].name] = fault
    paths = {path.name: path for some in files for path in some}

    def damaged_first(self, key, parts):
        name = f"{key.hex()}.kv"
        if fault := damage.pop(name, None):
            fault(paths[name])
        return read(self, key, parts)

    monkeypatch.setattr(BlockFolder, "read", damaged_first)
    with disk_engine(tiny, root) as llm:
        check_same(ask(llm, prompts), answers)
        assert not damage
        hits = disk_hits(llm)
        assert llm.reset_prefix_cache()
        check_same(ask(llm, prompts), answers)
        assert disk_hits(llm) > hits


@pytest.mark.more
def test_a_folder_that_vanishes(tiny, copied):
    root, prompts, answers, _ = copied
    with disk_engine(tiny, root) as llm:
        check_same(ask(llm, prompts[:1]), answers[:1])
        assert disk_hits(llm) == BLOCKS * 16
        shutil.rmtree(root)
        check_same(ask(llm, prompts), answers)
        run_out(llm)
        assert llm.reset_prefix_cache()
        check_same(ask(llm, prompts), answers)


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("pwritev", errno.ENOSPC),
        pytest.param("ftruncate", errno.EFBIG, marks=pytest.mark.slow),
        pytest.param("rename", errno.EIO, marks=pytest.mark.slow),
        pytest.param("open", errno.EROFS, marks=pytest.mark.more),
    ],
)
def test_a_disk_that_takes_no_bytes(tiny, copied, monkeypatch, call, number):
    root, prompts, answers, _ = copied
    original, failed = getattr(os, call), []

    def refuse(*arguments, **named):
        flags = arguments[1] if call == "open" else os.O_CREAT
        writer = threading.current_thread().name.startswith("kv-store")
        if writer and isinstance(flags, int) and not flags & os.O_CREAT and call == "open":
            return original(*arguments, **named)
        if writer:
            failed.append(call)
            raise OSError(number, os.strerror(number))
        return original(*arguments, **named)

    new = random_prompts([100], VOCAB, seed=7)
    with disk_engine(tiny, root) as llm:
        monkeypatch.setattr(os, call, refuse)
        (expected,) = ask(llm, new)
        check_same(ask(llm, prompts[:2]), answers[:2])
        run_out(llm)
        assert failed
        assert disk_hits(llm) == 2 * BLOCKS * 16
        assert llm.reset_prefix_cache()
        check_same(ask(llm, [*new, *prompts[:2]]), [expected, *answers[:2]])
        assert not list(root.rglob("*.tmp"))
        monkeypatch.undo()
