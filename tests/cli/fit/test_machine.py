# SPDX-License-Identifier: Apache-2.0
"""Macs by the size of their memory."""

import psutil
import pytest

from vllm_metal.cli.fit.machine import Machine

MIB = 2**20


@pytest.mark.parametrize(
    # What Metal recommended on such Macs, in MiB, as logged by llama.cpp; see the module.
    ("gigabytes", "logged"),
    [(16, 10922.67), (32, 21845.34), (96, 73728.0)],
)
def test_the_working_set_is_what_such_macs_have_logged(gigabytes, logged):
    assert Machine.mac(gigabytes << 30).total / MIB == pytest.approx(logged, abs=0.01)


def test_this_machine_is_what_it_is():
    machine = Machine.this()
    assert (machine.kind, machine.total) == ("cpu", psutil.virtual_memory().total)
    assert 0 < machine.in_use < machine.total
