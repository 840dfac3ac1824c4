# SPDX-License-Identifier: Apache-2.0
import plistlib
from pathlib import Path

import pytest

from vllm_metal.device import gpu_cores


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an `ioreg` with the given output on an otherwise empty PATH."""
    monkeypatch.setattr(gpu_cores.sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))

    def say(answer: bytes) -> None:
        (tmp_path / "answer").write_bytes(answer)
        command = tmp_path / "ioreg"
        command.write_text(
            '#!/bin/sh\n[ "$*" = "-a -r -d 1 -c AGXAccelerator" ] || exit 1\n'
            f'while read -r line; do echo "$line"; done < {tmp_path}/answer\n'
        )
        command.chmod(0o755)

    return say


def test_the_registry_s_number_is_told(said):
    entry = {"IOClass": "AGXAcceleratorG16G", "gpu-core-count": 10, "model": "Apple M4"}
    said(plistlib.dumps([entry]) + b"\n")
    assert gpu_cores.count() == 10


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no plist\n",
        plistlib.dumps([]) + b"\n",
        plistlib.dumps({"gpu-core-count": 10}) + b"\n",
        plistlib.dumps([{"model": "Apple M4"}]) + b"\n",
        plistlib.dumps([{"gpu-core-count": "ten"}]) + b"\n",
        plistlib.dumps([{"gpu-core-count": 0}]) + b"\n",
    ],
)
def test_what_is_no_number_of_cores_is_none(said, answer):
    said(answer)
    assert gpu_cores.count() is None


def test_without_the_command_it_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_cores.sys, "platform", "darwin")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_cores.count() is None


def test_elsewhere_than_on_a_mac_nothing_is_asked(said, monkeypatch: pytest.MonkeyPatch):
    said(plistlib.dumps([{"gpu-core-count": 10}]) + b"\n")
    monkeypatch.setattr(gpu_cores.sys, "platform", "linux")
    assert gpu_cores.count() is None
