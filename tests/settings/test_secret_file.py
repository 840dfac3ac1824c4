# SPDX-License-Identifier: Apache-2.0
"""Accepted secret files, and errors of others."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_metal.settings import secret_file

KEY = b"0123456789abcdef"


def write(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_read_without_the_space_around_it(tmp_path):
    assert secret_file.read(write(tmp_path / "key", b"\n " + KEY + b"\r\n"), "a") == KEY
    assert secret_file.read(write(tmp_path / "read", KEY, 0o400), "a") == KEY


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (KEY[:-1] + b" \n", 0o600, r"holds 15 bytes, but a secret needs 16.*openssl rand"),
        (b"", 0o600, "holds 0 bytes"),
        (KEY, 0o640, r".*mode 0640 gives other users access: run `chmod 600"),
        (KEY, 0o604, ".*mode 0604"),
        (KEY, 0o602, ".*mode 0602"),
        (KEY, 0o620, ".*mode 0620"),
        (KEY, 0o777, ".*mode 0777"),
    ],
)
def test_one_that_is_weak_or_open_is_refused(tmp_path, content, mode, reason):
    with pytest.raises(ValueError, match=rf"^the setting: .*key {reason}") as raised:
        secret_file.read(write(tmp_path / "key", content, mode), "the setting")
    assert KEY.decode() not in str(raised.value)


def test_one_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match=r"^the setting: .* cannot be read \("):
            secret_file.read(path, "the setting")


def test_one_secret_is_made_however_many_ask_for_it(tmp_path):
    path = tmp_path / "new" / "secret"
    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(lambda _: secret_file.read_or_make(path, "the setting"), range(20)))
    assert len(set(found)) == 1 and len(found[0]) == 64
    assert [made.name for made in path.parent.iterdir()] == ["secret"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret_file.read_or_make(write(tmp_path / "mine", KEY), "the setting") == KEY
    with pytest.raises(ValueError, match="a secret needs 16"):
        secret_file.read_or_make(write(tmp_path / "short", b"short"), "the setting")


def test_a_private_file_is_whole_or_as_before(tmp_path, monkeypatch):
    path = write(tmp_path / "file", b"before", 0o644)
    secret_file.write_private(path, "not taken", replace=False)
    assert path.read_text() == "before"

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(secret_file.os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        secret_file.write_private(path, "after")
    assert path.read_text() == "before" and [*tmp_path.iterdir()] == [path]
    monkeypatch.undo()
    secret_file.write_private(path, "after")
    assert path.read_text() == "after" and path.stat().st_mode & 0o777 == 0o600
