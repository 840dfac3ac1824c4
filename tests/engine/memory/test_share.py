# SPDX-License-Identifier: Apache-2.0
"""Workers on one machine get equal shares, whenever they measure."""

from vllm_metal.device.mlx_device import MemoryUsage
from vllm_metal.engine.memory.share import Share

GIB = 2**30
BEFORE = MemoryUsage(total=48 * GIB, available=40 * GIB, active=0)


def test_parts_are_equal_though_the_first_worker_has_taken_its_own():
    share = Share.of(2, BEFORE)
    first = share.part(BEFORE)
    meanwhile = MemoryUsage(total=48 * GIB, available=21 * GIB, active=0)
    assert share.part(meanwhile) == first
    assert (first.total, first.available) == (24 * GIB, 20 * GIB)
    assert 2 * first.available <= BEFORE.available


def test_what_a_worker_holds_itself_is_its_own():
    held = MemoryUsage(total=48 * GIB, available=30 * GIB, active=3 * GIB)
    assert Share.of(2, BEFORE).part(held).active == 3 * GIB


def test_a_machine_without_free_memory_has_none_for_a_part():
    full = MemoryUsage(total=48 * GIB, available=-GIB, active=0)
    assert Share.of(2, full).part(full).available == 0
