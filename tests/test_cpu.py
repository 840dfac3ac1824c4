# SPDX-License-Identifier: Apache-2.0
"""The tests compute on the CPU in float32, whatever the machine has."""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from cpu import use_cpu

TESTS = Path(__file__).parent


def test_this_process_computes_on_the_cpu_in_full_precision():
    assert mx.default_device() == mx.Device(mx.cpu)
    assert os.environ["VLLM_METAL_DEVICE"] == "cpu"
    assert os.environ["MLX_ENABLE_TF32"] == "0"


def test_the_device_is_set_and_not_left_to_mlx(monkeypatch: pytest.MonkeyPatch):
    chosen = []
    monkeypatch.setattr(mx, "set_default_device", chosen.append)
    use_cpu()
    assert chosen == [mx.cpu]
    monkeypatch.setenv("VLLM_METAL_DEVICE", "metal")
    use_cpu()
    assert chosen == [mx.cpu]


@pytest.mark.parametrize("first", ["conftest", "e2e.fuzz.__main__"])
def test_it_is_so_before_mlx_is_imported(first: str):
    """In pytest and `make fuzz`: importing MLX itself would end the process."""
    code = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            print(os.environ.get("MLX_ENABLE_TF32"), os.environ.get("VLLM_METAL_DEVICE"))
            os._exit(sys.stdout.flush() or 0)
sys.meta_path.insert(0, Watch())
import {first}
"""
    unset = ("MLX_ENABLE_TF32", "VLLM_METAL_DEVICE")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
        cwd=TESTS,  # so that its modules are found
    )
    assert done.stdout.split() == ["0", "cpu"]
