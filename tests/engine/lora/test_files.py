# SPDX-License-Identifier: Apache-2.0
"""An adapter's digest depends on its files' content only."""

import pytest
from vllm.exceptions import LoRAAdapterNotFoundError

from vllm_metal.engine.lora.files import AdapterError, AdapterFiles


def write(folder, config=b"{}", weights=b"0123", file="adapter_model.safetensors"):
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(config)
    (folder / file).write_bytes(weights)
    return AdapterFiles.find("mine", str(folder))


def test_the_digest_is_of_the_content(tmp_path):
    files = write(tmp_path / "one")
    assert files.digest() == files.read().digest == write(tmp_path / "same").digest()
    others = [
        write(tmp_path / "config", config=b"[]"),
        write(tmp_path / "weights", weights=b"0124"),
        write(tmp_path / "format", file="adapters.safetensors"),
    ]
    assert len({files.digest(), *(other.digest() for other in others)}) == 4


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoRAAdapterNotFoundError, match=r"mine .*/no/such"):
        AdapterFiles.find("mine", str(tmp_path / "no/such"))
    with pytest.raises(AdapterError, match=r"'mine' has no adapter_config.json"):
        AdapterFiles.find("mine", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"'mine' has none of adapter_model.safetensors"):
        AdapterFiles.find("mine", str(tmp_path))
