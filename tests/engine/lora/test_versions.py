# SPDX-License-Identifier: Apache-2.0
"""A request keeps the adapter content that it was loaded with."""

import pytest
from vllm.lora.request import LoRARequest

from vllm_metal.engine.lora.versions import Versions, of_content


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"first")
    return tmp_path


def request(folder, **options):
    return LoRARequest("mine", 7, str(folder), **options)


def test_content_counts_until_it_is_forgotten(folder):
    versions = Versions()
    first = versions.of(request(folder))
    assert (first.lora_name, first.asked_id, first.lora_path) == ("mine", 7, str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"second")
    assert versions.of(request(folder)) == first
    assert versions.of(request(folder)).digest == first.digest
    versions.forget(7)
    second = versions.of(request(folder))
    assert second.digest != first.digest
    assert second.lora_int_id != first.lora_int_id
    (folder / "adapter_model.safetensors").write_bytes(b"first")
    assert versions.of(request(folder, load_inplace=True)).digest == first.digest
    assert versions.of(request(folder)).digest == first.digest


def test_a_number_is_of_the_content(folder):
    numbers = {Versions().of(request(folder)).lora_int_id for _ in range(2)}
    assert numbers == {of_content(request(folder)).lora_int_id}
    assert 0 < numbers.pop() < 2**63
    known = Versions().of(request(folder))
    assert of_content(known) is known
