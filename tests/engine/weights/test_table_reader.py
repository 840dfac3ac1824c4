# SPDX-License-Identifier: Apache-2.0
"""Rows of a table on disk equal the file's, and each is read once while cached."""

import numpy as np
import pytest

from vllm_metal.engine.weights.table_reader import StoredRows, TableError, TableReader
from vllm_metal.metrics.step_metrics import take_measured

ROWS, WIDTHS = 200, (6, 3)
#: Rows at which the tensors' shards begin.
STARTS = ((0, 15, 90), (0, 40))
ROW_BYTES = sum(WIDTHS)


@pytest.fixture
def tables():
    """Makes [ROWS, width] for each part."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (ROWS, width), np.uint8) for width in WIDTHS]


@pytest.fixture
def parts(tmp_path, tables):
    """Two tensors in shards, each in a file of its own at an offset."""
    found = []
    for index, (table, starts) in enumerate(zip(tables, STARTS, strict=True)):
        shards = []
        for number, rows in enumerate(np.split(table, starts[1:])):
            path = tmp_path / f"part{index}-{number}"
            path.write_bytes(bytes(5 + index) + rows.tobytes())
            shards.append(StoredRows(path, 5 + index, len(rows), table.shape[1]))
        found.append(shards)
    return found


def read(reader, ids):
    """Returns [T, width] of each part, and the bytes read from the files."""
    take_measured()
    outs = [np.zeros((len(ids), width), np.uint8) for width in WIDTHS]
    reader.read(np.array(ids), outs)
    return outs, take_measured().get("table_bytes", 0)


def check(tables, ids, outs):
    for table, out in zip(tables, outs, strict=True):
        np.testing.assert_array_equal(out, table[ids])


def test_rows_are_read_once_while_they_are_cached(tables, parts):
    reader = TableReader(parts)
    for ids, read_now in (([3, 7, 3, 0, 39], 4), ([7, 3], 0), ([39, 8, 8], 1)):
        outs, nbytes = read(reader, ids)
        check(tables, ids, outs)
        assert nbytes == read_now * ROW_BYTES


def test_the_cache_is_bounded_and_drops_rows_used_longest_ago(tables, parts):
    reader = TableReader(parts, cache_bytes=3 * ROW_BYTES + 1)
    read(reader, [1, 2, 3])
    read(reader, [1])
    for ids, read_now in (([4], 1), ([1, 3, 4], 0), ([2], 1), ([1], 1)):
        outs, nbytes = read(reader, ids)
        check(tables, ids, outs)
        assert nbytes == read_now * ROW_BYTES
    assert reader.cache_bytes == 3 * ROW_BYTES
    assert reader.num_cached == 3


@pytest.mark.parametrize("capacity", [1, 3, 130, 1000])
def test_any_number_of_rows_at_once(tables, parts, capacity):
    """Also more than the cache holds; another cache counts the expected reads."""
    reader, rng = TableReader(parts, capacity * ROW_BYTES), np.random.default_rng(1)
    for count in (1, 30, 2, 100, 0, 7, 400, 7, 2000):
        ids = rng.integers(0, ROWS, count)
        outs, nbytes = read(reader, ids)
        check(tables, ids, outs)
        assert nbytes <= len(set(ids.tolist())) * ROW_BYTES
    # A large cache drops a few rows at a time.
    assert 0 <= min(capacity, ROWS) - reader.num_cached <= (capacity < ROWS) * capacity // 64


def test_a_removed_file_is_read_on_and_one_that_is_cut_off_is_an_error(tables, parts):
    reader = TableReader(parts)
    read(reader, [1])
    parts[0][0].file.unlink()
    outs, _ = read(reader, [2])
    check(tables, [2], outs)
    content = parts[1][0].file.read_bytes()
    with parts[1][0].file.open("r+b") as file:
        file.truncate(parts[1][0].offset + 10 * WIDTHS[1] + 1)
    outs, _ = read(reader, [9])
    check(tables, [9], outs)
    with pytest.raises(TableError, match=r"row 10 .*part1-0: the file was cut off\. Restore"):
        read(reader, [2, 5, 10, 20])
    # Rows read before it are right, and so is the rest once the file is.
    parts[1][0].file.write_bytes(content)
    outs, nbytes = read(reader, [20, 10, 5, 2])
    check(tables, [20, 10, 5, 2], outs)
    assert nbytes == 2 * ROW_BYTES
