# SPDX-License-Identifier: Apache-2.0
"""Addresses as users write them."""

import socket

import pytest

from vllm_metal.settings.address import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9100", "127.0.0.1", 9100),
        ("[::1]:9100", "::1", 9100),
        ("mac-studio.local:0", "mac-studio.local", 0),
        ("localhost:65535", "localhost", 65535),
        ("[fe80::1%en0]:80", "fe80::1%en0", 80),
    ],
)
def test_an_address_is_read_and_written_the_same(text, host, port):
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("127.0.0.1", "no port"),
        ("", "no port"),
        (":9100", " host"),
        ("host:", "is not a port"),
        ("host:65536", "is not a port"),
        ("host:-1", "is not a port"),
        ("host:+1", "is not a port"),
        ("host:٣", "is not a port"),
        ("host:http", "is not a port"),
        ("::1:9100", "brackets"),
        ("[::1:9100", "not an IPv6 address"),
        ("::1]:9100", "not an IPv6 address"),
        ("[]:9100", "not an IPv6 address"),
        ("[::1]", "is not a port"),
        ("[host]:9100", "not an IPv6 address"),
        ("tcp://host:9100", "brackets"),
        ("user@host:9100", " host"),
        ("a host:9100", " host"),
        (9100, "must be an address"),
        (None, "must be an address"),
    ],
)
def test_what_is_wrong_is_said(text, words):
    with pytest.raises(ValueError, match=words) as raised:
        Address.parse(text)
    assert "write host:port" in str(raised.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.7", False),
        ("10.0.0.1", False),
        ("fe80::1", False),
        ("::ffff:10.0.0.1", False),
        ("no-such-host.invalid", False),
        ("a..b", False),
    ],
)
def test_loopback_is_this_machine_only(host, expected):
    assert Address(host, 1).is_loopback is expected


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (["127.0.0.1", "::1"], True),
        (["127.0.0.1", "10.0.0.1"], False),
        (["10.0.0.1"], False),
    ],
)
def test_a_name_is_loopback_if_all_it_stands_for_is(monkeypatch, numbers, expected):
    def found(host, port, **others):
        kinds = [socket.AF_INET6 if ":" in number else socket.AF_INET for number in numbers]
        pairs = zip(kinds, numbers, strict=True)
        return [(kind, socket.SOCK_STREAM, 6, "", (number, port)) for kind, number in pairs]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert Address("name.local", 1).is_loopback is expected
    assert Address("name.local", 1).resolve()[0][1] == (numbers[0], 1)
