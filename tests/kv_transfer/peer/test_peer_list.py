# SPDX-License-Identifier: Apache-2.0
"""The peers file: format and changes."""

import os

import pytest

from vllm_metal.kv_transfer.peer.limits import MAX_PEERS
from vllm_metal.kv_transfer.peer.peer_list import PeersFile, read_peers
from vllm_metal.settings.address import Address

ONE, OTHER = Address("10.0.0.1", 9100), Address("mac.local", 9100)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "peers"


def test_an_address_a_line_with_comments(path):
    path.write_text(f"# our desks\n\n  {ONE}  # the large one\n{OTHER}\r\n[::1]:9\n")
    assert read_peers(path) == (ONE, OTHER, Address("::1", 9))
    path.write_text("")
    assert read_peers(path) == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"10.0.0.1:9100\n10.0.0.2\n", "line 2: '10.0.0.2' has no port"),
        (b"a:1\nb:1\n\na:1", "line 4 names a:1 again, after line 1"),
        (b"\xff\xfe", "can't decode"),
        (b"x" * (1 << 17), "has more than 65536 bytes"),
        (
            "\n".join(f"a:{n}" for n in range(MAX_PEERS + 1)).encode(),
            "65 addresses, but the maximum is 64",
        ),
    ],
)
def test_mistakes_are_named_with_the_file(path, content, reason):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"file of peers {path}.*{reason}"):
        read_peers(path)


def test_a_file_that_is_not_there(path):
    with pytest.raises(ValueError, match=f"{path} cannot be read: No such file"):
        PeersFile(path)


def test_it_is_read_again_when_it_changes(path):
    path.write_text(f"{ONE}\n")
    file = PeersFile(path)
    assert file.addresses == (ONE,) and not file.read_again()
    path.write_text(f"{ONE}\n{OTHER}\n")
    assert file.read_again() and file.addresses == (ONE, OTHER)
    path.write_text(f"# the same\n{OTHER}\n{ONE}\n")
    assert not file.read_again()
    new = path.with_suffix(".new")  # as editors and rsync write
    new.write_text(f"{OTHER}\n")
    os.replace(new, path)
    assert file.read_again() and file.addresses == (OTHER,)


def test_what_cannot_be_understood_is_told_once_and_changes_nothing(path):
    path.write_text(f"{ONE}\n")
    file = PeersFile(path)
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1"):
        file.read_again()
    assert not file.read_again() and file.addresses == (ONE,)
    path.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        file.read_again()
    assert not file.read_again() and file.addresses == (ONE,)
    path.write_text(f"{OTHER}\n")
    assert file.read_again() and file.addresses == (OTHER,)
