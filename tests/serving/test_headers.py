# SPDX-License-Identifier: Apache-2.0
"""Parsing of request headers; test_gate has their effects."""

import pytest

from vllm_metal.serving import headers

JSON = (b"content-type", b"application/json")


def read(*pairs):
    return headers.read({"headers": [*pairs]})


@pytest.mark.parametrize(
    ("pairs", "key"),
    [
        ([(b"authorization", b"Bearer vm-1")], "vm-1"),
        ([(b"authorization", b"bearer  vm-1 ")], "vm-1"),
        ([(b"x-api-key", b"vm-1")], "vm-1"),
        ([], None),
        ([(b"authorization", b"vm-1")], None),
        ([(b"authorization", b"Basic dTpw"), (b"x-api-key", b"vm-1")], None),
        ([(b"authorization", b"Bearer vm-1"), (b"x-api-key", b"vm-1")], None),
        ([(b"x-api-key", b"")], None),
        ([(b"x-api-key", b"k" * 257)], None),
        ([(b"x-api-key", "é".encode())], None),
    ],
)
def test_one_key_or_none(pairs, key):
    assert read(*pairs).api_key == key


@pytest.mark.parametrize(
    ("pairs", "refused"),
    [
        ([JSON], None),
        ([(b"content-type", b"Application/JSON; charset=utf-8")], None),
        ([JSON, (b"content-encoding", b"Identity")], None),
        ([JSON, (b"content-encoding", b"gzip")], "must not be compressed"),
        ([(b"content-type", b"text/plain")], "must be application/json"),
        ([JSON, JSON], "must be application/json"),
        ([], "must be application/json"),
    ],
)
def test_bodies_are_plain_json(pairs, refused):
    found = read(*pairs).body
    assert (found is None) if refused is None else (found.status == 400 and refused in str(found))


@pytest.mark.parametrize(
    ("values", "length"),
    [((), None), ((b"12",), 12), ((b"-1", b"7"), 7), ((b"1e3",), None), ((b"1" * 20,), None)],
)
def test_lengths(values, length):
    assert read(*((b"content-length", value) for value in values)).length == length


@pytest.mark.parametrize(
    ("values", "fresh"),
    [((), False), ((b"max-age=0",), False), ((b"No-Cache",), True), ((b"a", b"no-store"), True)],
)
def test_who_wants_a_new_answer(values, fresh):
    """Follows RFC 9111, section 5.2.1."""
    assert read(*((b"cache-control", value) for value in values)).fresh == fresh


@pytest.mark.parametrize("byte", [0, 8, 10, 13, 31, 127])
def test_control_characters_are_seen(byte):
    assert read((b"x-a", b"a" + bytes([byte]) + b"b")).has_controls
    assert not read((b"x-a", b"a\tb \xe9")).has_controls


def test_vllm_gets_neither_keys_nor_ids():
    sent = [(b"host", b"h"), (b"authorization", b"Bearer k"), (b"x-request-id", b"1"), JSON]
    assert read(*sent).forwarded == ((b"host", b"h"),)
    written = headers.with_body(sent, 5)
    assert (b"content-length", b"5") in written and written.count(JSON) == 1
    assert all(name != b"x-request-id" for name, _ in written)
