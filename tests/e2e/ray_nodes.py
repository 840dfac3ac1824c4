# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster for tests: nodes with a given number of devices, on this machine or on hosts."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from e2e.server import free_port
from network.hosts import Host

NO_RAY = "Ray is not installed: pip install ray"
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason=NO_RAY)
STARTED = "Ray runtime started"  # printed by a node that has joined the cluster
START_S = 120.0
STOP_S = 60.0
STORE_BYTES = 100 << 20  # for Ray's objects, which the tests do not use


@contextmanager
def ray_nodes(
    log: Path, devices: Sequence[int], hosts: Sequence[Host] = ()
) -> Iterator[dict[str, str]]:
    """Runs a cluster; yields the variables to find and join it.

    Args:
        log: folder for the nodes' output.
        devices: devices of each node; the first one is the head.
        hosts: hosts of the nodes, in order; none: this machine.

    Raises:
        AssertionError: a node ended, or did not start in time.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short, because socket paths include it
    address = f"{hosts[0].address if hosts else '127.0.0.1'}:{free_port()}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for number, count in enumerate(devices):
            host = hosts[number] if hosts else None
            command = _command(address, number, count, folder, host)
            path = log / f"node{number}"
            output = stack.enter_context(path.open("w"))
            node = subprocess.Popen(
                command if host is None else host.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | token | _variables(host),
            )
            stack.callback(_stop, node)
            _wait_until_started(node, path)
        yield {"RAY_ADDRESS": address} | token


def _command(address: str, number: int, devices: int, folder: Path, host: Host | None) -> list[str]:
    port = address.rpartition(":")[2]
    own = "127.0.0.1" if host is None else host.address
    role = (
        (f"--address={address}",)
        if number
        else ("--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false")
    )
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role),
        *(f"--num-gpus={devices}", "--num-cpus=1", f"--node-ip-address={own}"),
        *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"),
    ]


def _variables(host: Host | None) -> dict[str, str]:
    """Returns the variables for ranks on this node."""
    return {} if host is None else {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"}


def _wait_until_started(node: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while STARTED not in log.read_text():
        assert node.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.25)


def _stop(node: subprocess.Popen[bytes]) -> None:
    node.terminate()
    try:
        node.wait(STOP_S)
    except subprocess.TimeoutExpired:
        node.kill()
        node.wait()
