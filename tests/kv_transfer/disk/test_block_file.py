# SPDX-License-Identifier: Apache-2.0
"""The format of a block's file: every change of it is found."""

import os

import numpy as np
import pytest
from blake3 import blake3
from kv_transfer.disk import naive

from vllm_metal.kv_transfer.disk import block_file
from vllm_metal.kv_transfer.disk.block_file import HEADER_BYTES, BlockFile

FOLDER = "0123456789abcdef/shared"


def write(path, parts, key=b"k" * 36, folder=FOLDER):
    block = BlockFile(folder, key, block_file.total(parts))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    block_file.write(descriptor, block, block_file.as_bytes(parts))
    os.close(descriptor)
    return block


def read(path, block, parts):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return block_file.read(descriptor, block, parts)
    finally:
        os.close(descriptor)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "block"


def test_a_file_is_a_header_and_the_payload(path):
    parts = naive.block(1)
    block = write(path, parts)
    content = path.read_bytes()
    assert len(content) == block.size == HEADER_BYTES + 4000
    assert content[HEADER_BYTES:] == naive.joined(parts)
    covered = content[HEADER_BYTES:] + content[: HEADER_BYTES - 16]
    assert content[HEADER_BYTES - 16 : HEADER_BYTES] == blake3(covered).digest()[:16]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.float16, np.float32])
def test_arrays_of_all_dtypes_come_back_bit_by_bit(path, dtype):
    arrays = [np.frombuffer(np.random.default_rng(i).bytes(960), dtype) for i in range(3)]
    parts = [memoryview(array.reshape(4, 2, -1)) for array in arrays]
    block = write(path, parts)
    back = [np.zeros_like(array) for array in arrays]
    assert read(path, block, block_file.as_bytes([memoryview(array) for array in back]))
    for array, other in zip(arrays, back, strict=True):
        assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize("most", [None, 7, 1], ids=["as they come", "7 bytes", "1 byte"])
def test_any_number_of_parts_and_short_transfers(path, most, monkeypatch):
    """2,500 parts are more than one call takes; a call may transfer less than it was given."""
    number = 2500 if most is None else 40
    parts = naive.block(2, parts=number, part_bytes=13)
    parts[3] = memoryview(b"")
    if most is not None:
        monkeypatch.setattr(os, "pwritev", lambda fd, b, at: os.pwrite(fd, b[0][:most], at))

        def short(fd, buffers, at):
            got = os.pread(fd, min(most, len(buffers[0])), at)
            buffers[0][: len(got)] = got
            return len(got)

        monkeypatch.setattr(os, "preadv", short)
    block = write(path, parts)
    back = naive.blank(parts)
    assert read(path, block, block_file.as_bytes(back))
    assert naive.joined(back) == naive.joined(parts)


def test_large_parts_go_in_pieces(path, monkeypatch):
    monkeypatch.setattr(block_file, "_MAX_BYTES", 100)
    parts = [memoryview(bytes(range(250))), memoryview(b"x" * 99), memoryview(b"y" * 2)]
    block = write(path, parts)
    back = naive.blank(parts)
    assert read(path, block, back)
    assert naive.joined(back) == naive.joined(parts)


def test_a_disk_that_takes_nothing_is_an_error(path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="no more bytes"):
        write(path, naive.block(1))


def test_every_flipped_bit_is_found(path):
    parts = naive.block(3, parts=2, part_bytes=9)
    block = write(path, parts)
    good = path.read_bytes()
    scratch = memoryview(bytearray(7))
    back = naive.blank(parts)
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
    parts = naive.block(3, parts=2, part_bytes=9)
    block = write(path, parts)
    good = path.read_bytes()
    scratch = memoryview(bytearray(64))
    for length in range(len(good)):
        path.write_bytes(good[:length])
        assert not read(path, block, naive.blank(parts)), length
        assert not block_file.is_good(path, FOLDER, block.key, scratch), length
    path.write_bytes(good + b"\0")
    assert not read(path, block, naive.blank(parts))
    assert not block_file.is_good(path, FOLDER, block.key, scratch)


def test_a_file_that_shrinks_while_it_is_read(path, monkeypatch):
    parts = naive.block(3)
    block = write(path, parts)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert not read(path, block, naive.blank(parts))


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
    assert not read(path, other, [memoryview(bytearray(other.payload_bytes))])


@pytest.mark.parametrize("length", [0, 65])
def test_a_key_has_1_to_64_bytes(length):
    with pytest.raises(ValueError, match="1 to 64"):
        BlockFile(FOLDER, b"k" * length, 1)
