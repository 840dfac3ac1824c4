# SPDX-License-Identifier: Apache-2.0
"""The host and TCP port that an engine listens on."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

_FORM = "write host:port, such as 127.0.0.1:9100, [::1]:9100 or mac.local:9100"


@dataclass(frozen=True)
class Address:
    """A host (name or IP) and a port; with port 0 the system chooses one to listen on."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """Parses "127.0.0.1:9100", "[::1]:9100" or "mac.local:9100"; else raises ValueError."""
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
        """Whether every IP of the host is loopback. Resolves names, so it may block."""
        try:
            return all(is_loopback_ip(str(address[0])) for _, address in self.resolve())
        except OSError:  # a name that cannot be resolved is not loopback
            return False

    def resolve(self) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
        """Returns families and socket addresses, IPv4 first, at least one; may raise OSError."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # a label that is empty or too long
            raise OSError(f"{self.host} is not the name of a host") from error
        addresses: list[tuple[socket.AddressFamily, tuple[Any, ...]]] = [
            (family, address)
            for family, _, _, _, address in found
            if family in (socket.AF_INET, socket.AF_INET6)
        ]
        if not addresses:
            raise OSError(f"{self.host} has no IP address")
        return sorted(addresses, key=lambda each: each[0] != socket.AF_INET)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback_ip(text: str) -> bool:
    """Whether a text is a loopback IP; False if it is no IP."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1
    return (mapped or address).is_loopback
