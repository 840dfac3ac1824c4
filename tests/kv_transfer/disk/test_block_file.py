# SPDX-License-Identifier: Apache-2.0
"""The block file format detects every change."""

import os

import pytest
from blake3 import blake3
from kv_transfer.disk import naive

from vllm_metal.kv_transfer.disk import block_file
from vllm_metal.kv_transfer.disk.block_file import HEADER_BYTES, BlockFile

FOLDER = "0123456789abcdef/shared"


def write(path, page, key=b"k" * 36, folder=FOLDER):
    block = BlockFile(folder, key, page.nbytes)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    block_file.write(descriptor, block, page)
    os.close(descriptor)
    return block


def read(path, block, page):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return block_file.read(descriptor, block, page)
    finally:
        os.close(descriptor)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "block"


def test_a_file_is_a_header_and_the_page(path):
    page = naive.block(1)
    block = write(path, page)
    content = path.read_bytes()
    assert len(content) == block.size == HEADER_BYTES + 4000
    assert content[HEADER_BYTES:] == page
    covered = content[HEADER_BYTES:] + content[: HEADER_BYTES - 16]
    assert content[HEADER_BYTES - 16 : HEADER_BYTES] == blake3(covered).digest()[:16]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 129, 500])
@pytest.mark.parametrize("most", [None, 7, 1], ids=["as they come", "7 bytes", "1 byte"])
def test_any_size_and_short_transfers(path, size, most, monkeypatch):
    """A call may transfer less than it was given."""
    page = naive.block(2, size)
    if most is not None:
        monkeypatch.setattr(os, "pwritev", lambda fd, b, at: os.pwrite(fd, b[0][:most], at))

        def short(fd, buffers, at):
            got = os.pread(fd, min(most, len(buffers[0])), at)
            buffers[0][: len(got)] = got
            return len(got)

        monkeypatch.setattr(os, "preadv", short)
    block = write(path, page)
    back = naive.blank(page)
    assert read(path, block, back)
    assert back == page


def test_a_call_that_ends_within_the_page_goes_on_there(path, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv

    def cut(buffers):
        """Yields truncations of the header and its data."""
        return [buffers[0], *(buffer[:33] for buffer in buffers[1:])]

    monkeypatch.setattr(os, "pwritev", lambda fd, b, at: pwritev(fd, cut(b), at))
    monkeypatch.setattr(os, "preadv", lambda fd, b, at: preadv(fd, cut(b), at))
    page = naive.block(2, 500)
    block = write(path, page)
    back = naive.blank(page)
    assert read(path, block, back)
    assert path.read_bytes()[HEADER_BYTES:] == back == page


def test_large_pages_go_in_pieces(path, monkeypatch):
    sizes = []

    def noting(call):
        def noted(descriptor, buffers, offset):
            sizes.append(sum(map(len, buffers)))
            return call(descriptor, buffers, offset)

        return noted

    monkeypatch.setattr(os, "pwritev", noting(os.pwritev))
    monkeypatch.setattr(os, "preadv", noting(os.preadv))
    monkeypatch.setattr(block_file, "MAX_CALL_BYTES", 100)
    page = naive.block(2, 351)
    block = write(path, page)
    back = naive.blank(page)
    assert read(path, block, back)
    assert back == page
    assert sizes == 2 * [HEADER_BYTES + 100, 100, 100, 51]


def test_a_disk_that_takes_nothing_is_an_error(path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="no more bytes"):
        write(path, naive.block(1))


def test_every_flipped_bit_is_found(path):
    page = naive.block(3, 18)
    block = write(path, page)
    good = path.read_bytes()
    scratch = memoryview(bytearray(7))
    back = naive.blank(page)
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert not read(path, block, back), f"bit {bit}"
        assert not block_file.is_good(path, FOLDER, block.key, scratch), f"bit {bit}"
    path.write_bytes(good)
    assert read(path, block, back)
    assert block_file.is_good(path, FOLDER, block.key, scratch)


def test_every_other_length_is_found(path):
    page = naive.block(3, 18)
    block = write(path, page)
    good = path.read_bytes()
    scratch = memoryview(bytearray(64))
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert not read(path, block, naive.blank(page)), length
        assert not block_file.is_good(path, FOLDER, block.key, scratch), length
    path.write_bytes(good + b"\0")
    assert not read(path, block, naive.blank(page))
    assert not block_file.is_good(path, FOLDER, block.key, scratch)


def test_a_file_that_shrinks_while_it_is_read(path, monkeypatch):
    page = naive.block(3)
    block = write(path, page)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert not read(path, block, naive.blank(page))


@pytest.mark.parametrize(
    "other",
    [
        BlockFile(FOLDER, b"other" + b"k" * 31, 4000),
        BlockFile(FOLDER, b"k" * 35, 4000),
        BlockFile(FOLDER, b"k" * 36 + b"\0", 4000),
        BlockFile("0123456789abcdef/tenant-1", b"k" * 36, 4000),
        BlockFile("fedcba9876543210/shared", b"k" * 36, 4000),
        BlockFile(FOLDER, b"k" * 36, 3999),
    ],
    ids=["key", "shorter key", "padded key", "namespace", "fingerprint", "length"],
)
def test_a_file_of_another_block_is_not_taken_for_this_one(path, other):
    write(path, naive.block(1))
    assert not read(path, other, memoryview(bytearray(other.payload_bytes)))


def test_a_file_of_another_user_is_no_block(path, monkeypatch):
    page = naive.block(1)
    block = write(path, page)
    scratch = memoryview(bytearray(page.nbytes))
    assert read(path, block, scratch)
    assert block_file.is_good(path, block.folder, block.key, scratch)
    naive.give_away(path, monkeypatch)
    assert not read(path, block, scratch)
    assert not block_file.is_good(path, block.folder, block.key, scratch)


@pytest.mark.parametrize("length", [0, 65])
def test_a_key_has_1_to_64_bytes(length):
    with pytest.raises(ValueError, match="1 to 64"):
        BlockFile(FOLDER, b"k" * length, 1)
