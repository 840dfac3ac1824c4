# SPDX-License-Identifier: Apache-2.0
"""Emulates hosts with network namespaces on a bridge, with rates limited by `tc`.

The machine itself has an address on the bridge, so a test can act as a client.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_DEVICE = "eth0"  # inside a host
_numbers = itertools.count()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@cache
def why_not() -> str | None:
    """Returns why hosts are unavailable here; None if they are available."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"network namespaces need {program} (Debian's iproute2)"
    try:
        with hosts(1, rate="1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"


def need_hosts() -> None:
    """Skips the calling test or module where hosts are unavailable."""
    if (reason := why_not()) is not None:
        pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Host:
    """A host with its own loopback, and `eth0`, which connects to the others."""

    namespace: str
    device: str  # its end on the bridge
    address: str  # address of its eth0
    gateway: str  # address of this machine, as seen by the hosts

    def command(self, *command: str) -> list[str]:
        """Prefix that runs a command in this host."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def popen(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Starts a command in this host; killed at the end if it still runs."""
        return subprocess.Popen(self.command(*command), **options)

    def set_rate(self, rate: str) -> None:
        """Limits its sending and receiving rates.

        Args:
            rate: as in `tc`, such as "100mbit".
        """
        inside = ("ip", "netns", "exec", self.namespace)
        for where, device in ((inside, _DEVICE), ((), self.device)):
            for kind in (
                f"qdisc replace dev {device} root handle 1: htb default 1",
                f"class replace dev {device} parent 1: classid 1:1 htb rate {rate} ceil {rate}",
            ):
                _run(*where, "tc", *kind.split())

    def cut(self) -> None:
        """Unplugs its cable; connections hang, because nothing closes them."""
        _run("ip", "link", "set", self.device, "down")

    def mend(self) -> None:
        """Plugs its cable in again."""
        _run("ip", "link", "set", self.device, "up")

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes sent over its cable so far."""
        return self._count("rx_bytes")

    @property
    def received_bytes(self) -> int:
        """Returns the bytes received over its cable so far."""
        return self._count("tx_bytes")

    def _count(self, name: str) -> int:  # of the cable's other end
        return int(Path(f"/sys/class/net/{self.device}/statistics/{name}").read_text())

    def pids(self) -> list[int]:
        """Returns the processes that run in it."""
        pids = ("ip", "netns", "pids", self.namespace)
        found = subprocess.run(pids, capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to all of its processes."""
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:  # it has ended meanwhile
                continue


@contextmanager
def hosts(count: int, rate: str = "10gbit") -> Iterator[tuple[Host, ...]]:
    """Makes hosts on one bridge; removes them and their processes at the end.

    Args:
        count: number of hosts, 1 to 200.
        rate: see `Host.set_rate`.

    Raises:
        CalledProcessError: namespaces are not allowed.
    """
    pid, number = os.getpid() % 4096, next(_numbers) % 16
    net = f"10.{64 + pid // 64}.{pid % 64 * 4 + number % 4}"
    bridge = f"vb{pid:x}-{number:x}"
    made: list[Host] = []
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "address", "add", f"{net}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for index in range(count):
            name = f"vh{pid:x}-{number:x}-{index:x}"
            host = Host(name, name, f"{net}.{index + 1}", f"{net}.254")
            _run("ip", "netns", "add", name)
            made.append(host)
            peer = ("peer", "name", _DEVICE, "netns", name)
            _run("ip", "link", "add", host.device, "type", "veth", *peer)
            _run("ip", "link", "set", host.device, "master", bridge, "up")
            for command in (
                ("ip", "address", "add", f"{host.address}/24", "dev", _DEVICE),
                ("ip", "link", "set", _DEVICE, "up"),
                ("ip", "link", "set", "lo", "up"),
                ("ip", "route", "add", "default", "via", host.gateway),
            ):
                _run(*host.command(*command))
            host.set_rate(rate)
        yield tuple(made)
    finally:
        for host in made:
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True)
            subprocess.run(["ip", "link", "delete", host.device], capture_output=True)
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)
