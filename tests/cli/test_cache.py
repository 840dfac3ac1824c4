# SPDX-License-Identifier: Apache-2.0
"""`vllm-metal cache` as a user types it."""

import io
import json
import os
import sys
import time

import pytest
from kv_transfer.disk import naive

from vllm_metal.cli import cache as command
from vllm_metal.cli.main import main
from vllm_metal.kv_transfer.disk.ledger import read_balance
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.space import WriteResult
from vllm_metal.kv_transfer.disk.store import DiskStore

DAY = 86400
LLAMA, QWEN = "aa" * 16, "bb" * 16


@pytest.fixture
def root(tmp_path):
    """Four blocks of one model, one old and two of a tenant, and one of another model."""
    root = tmp_path / "cache"
    cache = DiskStore(root, Limits(10**8, None))
    now = time.time()
    llama = {"model": "llama", "weights": "c0ffee" * 10, "kv_cache_dtype": "fp8", "more": [1, 2]}
    for fingerprint, facts, namespace, number, age in [
        (LLAMA, llama, "shared", 1, 0),
        (LLAMA, llama, "shared", 2, 40 * DAY),
        (LLAMA, llama, "tenant-7", 3, 0),
        (LLAMA, llama, "tenant-7", 4, 0),
        (QWEN, {"model": "qwen"}, "shared", 5, 0),
    ]:
        folder = cache.blocks(fingerprint, facts, namespace)
        block = naive.block(number)
        assert folder.write(naive.key(number), block, now - age, 0) is WriteResult.STORED
    cache.close()
    return root


@pytest.fixture
def run(capsys):
    """Runs `vllm-metal cache`; returns the status, output and errors."""

    def running(*args):
        status = main(["cache", *map(str, args)])
        return (status, *capsys.readouterr())

    return running


@pytest.fixture
def terminal(monkeypatch):
    """Makes a user at a terminal answer."""

    def answering(answer):
        stdin = io.StringIO(f"{answer}\n")
        stdin.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stdin)

    return answering


def numbers(root):
    return sorted(int(path.name[:2], 16) for path in naive.files(root))


def test_ls_shows_models_facts_and_namespaces(run, root):
    status, out, _ = run("ls", root)
    header, *rows, total = [line.split() for line in out.splitlines()]
    assert status == 0
    assert header[:4] == ["fingerprint", "model", "weights", "kv_cache_dtype"]
    assert [row[:7] for row in rows] == [
        [LLAMA[:12], "llama", "c0ffeec0ffee", "fp8", "shared", "2", "0.02"],
        [LLAMA[:12], "llama", "c0ffeec0ffee", "fp8", "tenant-7", "2", "0.02"],
        [QWEN[:12], "qwen", "-", "-", "shared", "1", "0.01"],
    ]
    since = (time.time() - 600, time.time())  # it may be midnight
    assert {row[8] for row in rows} & {time.strftime("%Y-%m-%d", time.localtime(t)) for t in since}
    assert total[:2] == [f"{naive.room(root) / 1e6:.2f}", "MB"]


def test_ls_as_json(run, root):
    status, out, _ = run("ls", root, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["bytes"] == naive.room(root)
    assert found["fingerprints"].keys() == {LLAMA, QWEN}
    llama = found["fingerprints"][LLAMA]
    assert llama["facts"]["more"] == [1, 2]
    assert llama["namespaces"]["tenant-7"]["blocks"] == 2
    assert llama["namespaces"]["tenant-7"]["bytes"] == 2 * 8192
    assert abs(llama["namespaces"]["shared"]["last_used"] - time.time()) < 600


def test_ls_of_a_fingerprint_without_blocks_or_manifest(run, root):
    (root / LLAMA / "manifest.json").unlink()
    run("rm", root, "--fingerprint", QWEN, "--yes")
    cache = DiskStore(root, Limits(10**8, None))
    cache.blocks("cc" * 16, {"model": "new"})
    naive.wait_until(lambda: "cc" * 16 in cache.manifests())
    cache.close()
    _, out, _ = run("ls", root)
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:5] == [LLAMA[:12], "-", "-", "-", "shared"]
    assert rows[3][:6] == ["cc" * 6, "new", "-", "-", "-", "0"]


@pytest.mark.parametrize("action", ["ls", "rm", "verify"])
def test_a_folder_that_is_no_cache_is_refused(run, tmp_path, action):
    (tmp_path / "thesis.tex").write_text("mine")
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "thesis.tex"):
        status, _, error = run(action, folder, *(["--yes"] if action == "rm" else []))
        assert status == 1
        assert error == (
            f"vllm-metal: error: {folder} is not a prefix cache; give the folder of "
            "prefix_cache_dir\n"
        )
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_rm_removes_everything(run, root):
    status, out, _ = run("rm", root, "--yes")
    assert (status, out) == (0, "removed 5 blocks (0.04 MB)\n")
    assert not root.exists()


def test_rm_leaves_files_of_others(run, root):
    (root / "theirs").write_text("mine")
    assert run("rm", root, "--yes")[0] == 0
    assert os.listdir(root) == ["theirs"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--fingerprint", LLAMA], [5]),
        (["--fingerprint", "bb"], [1, 2, 3, 4]),
        (["--namespace", "tenant-7"], [1, 2, 5]),
        (["--older-than", "30d"], [1, 3, 4, 5]),
        (["--older-than", "50d"], [1, 2, 3, 4, 5]),
        (["--fingerprint", LLAMA, "--namespace", "shared"], [3, 4, 5]),
        (["--namespace", "shared", "--older-than", "1h"], [1, 3, 4, 5]),
        (["--fingerprint", "cc"], [1, 2, 3, 4, 5]),
    ],
)
def test_rm_removes_what_every_option_is_for(run, root, options, left):
    assert run("rm", root, "--yes", *options)[0] == 0
    assert numbers(root) == left
    assert read_balance(root).bytes == naive.room(root)
    assert (root / LLAMA).exists() == any(number < 5 for number in left)
    assert (root / QWEN).exists() == (5 in left)


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("YES", 0), ("n", 1), ("", 1)])
def test_rm_asks_on_a_terminal(run, root, terminal, answer, status):
    terminal(answer)
    found, out, _ = run("rm", root)
    assert found == status
    assert f"Remove 5 blocks (0.04 MB) from {root}? [y/N]" in out
    assert root.exists() == bool(status)


def test_rm_without_a_terminal_wants_to_be_told(run, root, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    status, _, error = run("rm", root)
    assert status == 1
    assert "--yes" in error
    assert numbers(root) == [1, 2, 3, 4, 5]


def test_rm_beside_an_engine(run, root):
    cache = DiskStore(root, Limits(10**8, None))
    folder = cache.blocks(LLAMA, {"model": "llama"})
    assert folder.write(naive.key(9), naive.block(9), 0.0, 0) is WriteResult.STORED
    assert run("rm", root, "--yes")[0] == 0
    page = naive.blank(naive.block(9))
    assert not folder.read(naive.key(9), page)
    assert folder.write(naive.key(9), naive.block(9), 0.0, 0) is WriteResult.STORED
    assert folder.read(naive.key(9), page)
    assert cache.manifests().keys() == {LLAMA}
    assert cache.stats().bytes == naive.room(root)
    cache.close()


def test_rm_says_what_it_could_not_remove(run, root, monkeypatch):
    def fails(*_):
        raise PermissionError

    monkeypatch.setattr(os, "unlink", fails)
    status, _, error = run("rm", root, "--yes")
    assert status == 1
    assert "5 blocks could not be removed" in error
    assert read_balance(root).bytes == naive.room(root)


def damage(path):
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)


def test_verify_finds_bad_blocks_and_leaves_them(run, root):
    assert run("verify", root)[:2] == (0, "5 good, 0 bad\n")
    one, two, three, *_ = naive.files(root)
    damage(one)
    os.truncate(two, 50)
    renamed = three.parent.with_name("06") / f"{naive.key(6).hex()}.kv"
    renamed.parent.mkdir()
    three.rename(renamed)
    status, out, _ = run("verify", root)
    assert status == 1
    assert f"bad: {one.relative_to(root)}\n" in out
    assert f"bad: {renamed.relative_to(root)}\n" in out
    assert "2 good, 3 bad\n" in out
    assert "--remove" in out


def test_verify_removes_bad_blocks(run, root):
    damage(naive.files(root)[0])
    status, out, _ = run("verify", root, "--remove")
    assert (status, out) == (0, "4 good, 1 bad, 1 of them removed\n")
    assert len(naive.files(root)) == 4
    assert read_balance(root).bytes == naive.room(root)
    assert run("verify", root)[0] == 0


def test_verify_fails_if_bad_ones_are_left(run, root, monkeypatch):
    damage(naive.files(root)[0])

    def fails(*_):
        raise PermissionError

    monkeypatch.setattr(os, "unlink", fails)
    status, out, _ = run("verify", root, "--remove")
    assert status == 1
    assert "4 good, 1 bad, 0 of them removed\n" in out


def test_verify_takes_unreadable_blocks_for_bad_and_vanished_ones_for_none(run, root, monkeypatch):
    unreadable, vanishes, *_ = naive.files(root)
    opened = os.open

    def opening(path, *args, **kwargs):
        if str(path) == str(unreadable):
            raise PermissionError
        if str(path) == str(vanishes):
            os.unlink(path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    status, out, _ = run("verify", root)
    assert status == 1
    assert "3 good, 1 bad\n" in out


def test_verify_shows_progress_on_a_terminal(run, root, monkeypatch):
    told = []

    class Bar:
        def __init__(self, total, **_):
            told.append(total)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def update(self, number):
            told.append(number)

    monkeypatch.setattr(command, "tqdm", Bar)
    run("verify", root)
    assert told == [5 * 8192, *[8192] * 5]
