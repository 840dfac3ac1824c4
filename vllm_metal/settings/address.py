# SPDX-License-Identifier: Apache-2.0
"""Where an engine listens: a host and a TCP port."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

_FORM = "write host:port, such as 127.0.0.1:9100, [::1]:9100 or mac.local:9100"


@dataclass(frozen=True)
class Address:
    """A host, by name or number, and a port; 0 lets the system choose one to listen on."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """From "127.0.0.1:9100", "[::1]:9100" or "mac.local:9100".

        Raises:
            ValueError: it is none of these; the message says what is wrong.
        """
        if not isinstance(text, str):
            raise ValueError(f"must be an address, not {text!r}: {_FORM}")
        host, colon, port = text.rpartition(":")
        if not colon:
            raise ValueError(f"{text!r} has no port: {_FORM}")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError(f"{text!r}: {port!r} is not a port from 0 to 65535: {_FORM}")
        if host.startswith("[") or host.endswith("]"):
            host, in_brackets = host[1:-1], host
            try:
                ipaddress.IPv6Address(host)
                if in_brackets != f"[{host}]":
                    raise ValueError
            except ValueError as error:
                raise ValueError(
                    f"{text!r}: {in_brackets} is not an IPv6 address: {_FORM}"
                ) from error
        elif ":" in host:
            raise ValueError(f"{text!r}: put an IPv6 address in brackets: {_FORM}")
        if not host:
            raise ValueError(f"{text!r} has no host: {_FORM}")
        if any(sign.isspace() or sign in "/@?#" for sign in host):
            raise ValueError(f"{text!r}: {host!r} is not a host: {_FORM}")
        return Address(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be meant. Asks for what a name stands for; may block.

        A name that stands for nothing, or cannot be asked for, is not loopback.
        """
        try:
            return all(is_loopback_ip(str(place[0])) for _, place in self.resolve())
        except OSError:
            return False

    def resolve(self) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
        """Families and socket addresses that it stands for, IPv4 first; at least one.

        Raises:
            OSError: the name is not known.
        """
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # a label that is empty or too long
            raise OSError(f"{self.host} is not the name of a host") from error
        places: list[tuple[socket.AddressFamily, tuple[Any, ...]]] = [
            (family, place)
            for family, _, _, _, place in found
            if family in (socket.AF_INET, socket.AF_INET6)
        ]
        if not places:
            raise OSError(f"{self.host} has no IP address")
        return sorted(places, key=lambda each: each[0] != socket.AF_INET)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback_ip(text: str) -> bool:
    """Whether a number is of this machine's own network; False for what is no number."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or address).is_loopback
