# SPDX-License-Identifier: Apache-2.0
"""Checks the network between machines that will share a model, before ranks are started.

The checks send nothing except one connection attempt.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import psutil

from vllm_metal.cli.doctor.report import Finding, Status
from vllm_metal.settings import local_network

#: Timeout of a connection to the first machine in seconds; on a local network it takes 1 ms.
_CONNECT_S = 5.0
_HOST_IP, _INTERFACE = "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Network:
    """A machine's network, and the user's settings for it."""

    interfaces: Mapping[str, tuple[str, ...]]  # addresses by interface
    own_name: tuple[str, ...]  # addresses that the machine's own name resolves to
    host_ip: str = ""  # VLLM_HOST_IP
    interface: str = ""  # GLOO_SOCKET_IFNAME

    @property
    def addresses(self) -> set[str]:
        return {address for each in self.interfaces.values() for address in each}

    @property
    def interface_list(self) -> str:
        """Lists the interfaces that reach other machines, with addresses, for the advice."""
        return ", ".join(
            f"{name} {' '.join(others)}"
            for name, addresses in self.interfaces.items()
            if (others := [address for address in addresses if not _is_loopback(address)])
        )

    def interface_of(self, address: str) -> str | None:
        """Returns the interface that has an address, or None."""
        return next((name for name, has in self.interfaces.items() if address in has), None)


def this_network() -> Network:
    """Reads this machine's network and settings."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = {
        name: tuple(each.address.partition("%")[0] for each in has if each.family in families)
        for name, has in psutil.net_if_addrs().items()
    }
    own_name = _resolve(socket.gethostname())
    given = (os.environ.get(name, "") for name in (_HOST_IP, _INTERFACE))
    return Network({name: has for name, has in interfaces.items() if has}, own_name, *given)


def checks(network: Network, first: str | None, port: int) -> Iterator[Finding]:
    """Checks the settings that the user gave, and the connection to the first machine.

    `first` and `port` are --master-addr (None: not given) and --master-port of `vllm serve`.
    """
    if network.host_ip:
        yield check_host_ip(network)
    if network.interface:
        yield check_interface(network)
    if first is None:
        return
    found = _resolve(first)
    if not found:
        seen = f"--master-addr {first} is not a name or address that this machine can resolve"
        yield Finding("first machine", "failed", seen, "Give its address on the common network.")
        return
    if not network.interface:
        yield check_own_name(network, _source_address(found[0]))
    yield check_first(network, found[0], port)


def check_host_ip(network: Network) -> Finding:
    """Checks that the address announced to other machines belongs to this one."""
    seen = f"{_HOST_IP}={network.host_ip}"
    if network.host_ip not in network.addresses:
        advice = f"Set it to an address that this machine has: {network.interface_list}."
        return Finding("address", "failed", f"{seen} is not an address of this machine", advice)
    where = network.interface_of(network.host_ip)
    if network.interface and where not in network.interface.split(","):
        seen = f"{seen} is on {where}, and {_INTERFACE} is {network.interface}"
        advice = "Ranks would use two networks: choose one for both variables."
        return Finding("address", "warning", seen, advice)
    return Finding("address", "ok", f"{seen} is on {where}")


def check_interface(network: Network) -> Finding:
    """Checks that the interface for ranks exists and has an address."""
    seen = f"{_INTERFACE}={network.interface}"
    missing = [name for name in network.interface.split(",") if name not in network.interfaces]
    if missing:
        seen = f"{seen}: there is no {', '.join(missing)} with an address"
        return Finding(
            "interface", "failed", seen, f"Choose one of these: {network.interface_list}."
        )
    return Finding("interface", "ok", seen)


def check_own_name(network: Network, own: str | None) -> Finding:
    """Checks the address that ranks announce for this machine if no interface is set.

    `own`: this machine's address on the route to the first machine; None if there is no route.
    """
    # gloo uses the address of the machine's own name, else the loopback address.
    usable = (each for each in network.own_name if each in network.addresses or _is_loopback(each))
    stands_for = next(usable, "127.0.0.1")
    interface = None if own is None else network.interface_of(own)
    if own is None or interface is None or stands_for == own or _is_loopback(own):
        return Finding("interface", "ok", f"{_INTERFACE} is not set")
    seen = f"{_INTERFACE} is not set, and this machine's name stands for {stands_for}, not {own}"
    status: Status = "failed" if _is_loopback(stands_for) else "warning"
    advice = f"Ranks elsewhere would look for it there: export {_INTERFACE}={interface}."
    return Finding("interface", status, seen, advice)


def check_first(network: Network, address: str, port: int) -> Finding:
    """Checks that the first rank's machine is this one, or can be reached at `port`."""
    name = "first machine"
    if address in network.addresses:
        return Finding(name, "ok", "--master-addr is this machine: it takes --node-rank 0")
    try:
        with socket.create_connection((address, port), _CONNECT_S):
            return Finding(name, "ok", f"its first rank waits at port {port}")
    except ConnectionRefusedError:
        return Finding(name, "ok", f"it answers; nothing waits at port {port} yet")
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "no answer")
        seen = f"cannot be reached at port {port} ({code})"
        advice = (
            "Check its cable, address and firewall; its ranks also accept connections at "
            "ports that the system chooses."
        )
        more = local_network.advice(error)
        return Finding(name, "failed", seen, f"{advice} {more}".strip())


def _source_address(address: str) -> str | None:
    # Connecting a UDP socket selects a route and sends nothing.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _resolve(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(str(address[0]).partition("%")[0] for *_, address in found)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
