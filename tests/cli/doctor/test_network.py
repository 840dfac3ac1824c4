# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of the network between machines that will share a model."""

import errno
import json
import socket

import pytest

from vllm_metal.cli.doctor.network import (
    Network,
    check_first,
    check_host_ip,
    check_interface,
    check_own_name,
    checks,
    this_network,
)
from vllm_metal.cli.main import main

INTERFACES = {"lo0": ("127.0.0.1",), "en0": ("192.168.1.7",), "bridge0": ("10.0.0.2",)}


def network(**changes):
    return Network(**({"interfaces": INTERFACES, "own_name": ("192.168.1.7",)} | changes))


def test_an_address_of_another_machine_is_named_with_those_of_this_one():
    found = check_host_ip(network(host_ip="10.0.0.9"))
    assert found.status == "failed" and "10.0.0.9 is not an address of this machine" in found.seen
    assert "en0 192.168.1.7, bridge0 10.0.0.2." in found.advice
    assert check_host_ip(network(host_ip="10.0.0.2")).status == "ok"


def test_an_address_beside_the_interface_is_a_warning():
    both = {"host_ip": "192.168.1.7", "interface": "bridge0"}
    assert check_host_ip(network(**both)).status == "warning"
    assert check_host_ip(network(**both | {"host_ip": "10.0.0.2"})).status == "ok"


def test_an_interface_that_is_not_there():
    found = check_interface(network(interface="bridge1"))
    assert (found.status, "no bridge1" in found.seen) == ("failed", True)
    assert "bridge0 10.0.0.2" in found.advice
    assert check_interface(network(interface="en0,bridge0")).status == "ok"


@pytest.mark.parametrize(
    ("own_name", "status"),
    [
        (("10.0.0.2",), "ok"),
        (("192.168.1.7",), "warning"),
        (("127.0.0.1",), "failed"),
        (("127.0.1.1",), "failed"),  # as Debian has it; gloo then takes the loopback address
        ((), "failed"),
    ],
)
def test_what_this_machines_name_stands_for(own_name, status):
    found = check_own_name(network(own_name=own_name), "10.0.0.2")
    assert found.status == status
    assert status == "ok" or "export GLOO_SOCKET_IFNAME=bridge0" in found.advice


def test_the_first_machine_is_this_one_or_answers_or_does_not(monkeypatch):
    assert "--node-rank 0" in check_first(network(), "10.0.0.2", 29501).seen
    elsewhere = network()  # which does not have this machine's own address
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        other = Network({"en0": ("192.168.1.7",)}, ())
        assert check_first(other, "127.0.0.1", port).seen == f"its first rank waits at port {port}"
    assert check_first(other, "127.0.0.1", port).status == "ok"  # it answers that nothing listens

    def unreachable(*_):
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr("sys.platform", "linux")
    found = check_first(elsewhere, "10.0.0.1", 29501)
    assert found.status == "failed" and "EHOSTUNREACH" in found.seen
    assert "Local Network" not in found.advice
    monkeypatch.setattr("sys.platform", "darwin")
    assert "Local Network" in check_first(elsewhere, "10.0.0.1", 29501).advice


def test_nothing_is_said_where_nothing_is_asked():
    assert list(checks(network(), None, 29501)) == []


def test_this_machine_has_a_loopback_address():
    assert "127.0.0.1" in this_network().addresses


def test_the_command_names_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_HOST_IP", "203.0.113.5")  # of no machine: RFC 5737
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    report = tmp_path / "report.json"
    line = ["doctor", "--only", "machine", "--report", str(report)]
    assert main([*line, "--master-addr", "127.0.0.1"]) == 1
    found = {each["name"]: each for each in json.loads(report.read_text())["findings"]}
    assert found["address"]["status"] == found["interface"]["status"] == "failed"
    assert "there is no nowhere0" in found["interface"]["seen"]
    assert found["first machine"]["status"] == "ok"
    assert "203.0.113.5" not in report.read_text()
