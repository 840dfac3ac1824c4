# SPDX-License-Identifier: Apache-2.0
import pytest
from mac import tell_numbers

from vllm_metal.device import sysctl


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("number", [0, 1, 16384, 2**31 + 5, 2**32 - 1])
def test_numbers_of_32_and_64_bits_are_read(monkeypatch, number, width):
    tell_numbers(monkeypatch, {"vm.page_free_count": number.to_bytes(width, "little")})
    assert sysctl.read("vm.page_free_count") == number


def test_a_size_beyond_32_bits(monkeypatch):
    tell_numbers(monkeypatch, {"hw.memsize": (512 * 2**30).to_bytes(8, "little")})
    assert sysctl.read("hw.memsize") == 512 * 2**30


def test_a_name_the_kernel_does_not_know_is_none(monkeypatch):
    tell_numbers(monkeypatch, {"hw.memsize": bytes(8)})
    assert sysctl.read("vm.page_free_count") is None


def test_more_than_a_number_is_none(monkeypatch):
    tell_numbers(monkeypatch, {"hw.model": b"Mac16,1 and more\0"})
    assert sysctl.read("hw.model") is None


def test_texts_are_read(monkeypatch):
    tell_numbers(monkeypatch, {"machdep.cpu.brand_string": b"Apple M4 Pro\0"})
    assert sysctl.read_text("machdep.cpu.brand_string") == "Apple M4 Pro"
    assert sysctl.read_text("hw.model") is None
