# SPDX-License-Identifier: Apache-2.0
"""The limit on a command buffer's elements is raised before MLX first uses the GPU."""

import os
import subprocess
import sys

import pytest

from metal_kernels import command_buffers
from metal_kernels.command_buffers import DISPATCHES_OF_A_LAYER
from metal_kernels.pace import MOST_WORK

#: Notes the variable when anything in the process first makes an array, or asks for the device.
NOTING = """
import os
import mlx.core as mx
noted = []
def note(function):
    def call(*given, **named):
        noted.append(os.environ.get("MLX_MAX_MB_PER_BUFFER"))
        return function(*given, **named)
    return call
for name in ("zeros", "ones", "arange", "device_info", "device_count", "default_stream", "eval"):
    setattr(mx, name, note(getattr(mx, name)))
real = mx.array
class Meta(type):
    def __call__(cls, *given, **named):
        return note(real)(*given, **named)
    def __instancecheck__(cls, value):
        return isinstance(value, real)
mx.array = Meta("array", (), {"__module__": "mlx.core"})
"""
USES = {
    "an op": "import metal_kernels.op_common",
    "the self-check's process": "import metal_kernels.selfcheck.__main__",
    "mlx-lm's kernels": "import vllm_metal.patches.mlx_patches.library_kernels",
    "the worker": "import vllm.platforms\nfrom vllm.platforms import current_platform\n"
    "assert type(current_platform).__name__ == 'MetalPlatform'\n"
    "import vllm_metal.engine.worker.worker",
}


def alone(script, **variables):
    """Returns the output of a process with settings like on a Mac's GPU."""
    kept = {name: value for name, value in os.environ.items() if "MLX_MAX" not in name}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=kept | {"VLLM_METAL_DEVICE": "metal"} | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            use, marks=pytest.mark.more if use in ("mlx-lm's kernels", "the worker") else ()
        )
        for use in USES
    ],
)
def test_it_is_raised_when_the_first_array_is_made(use):
    assert alone(f"{NOTING}\n{USES[use]}\nprint(noted[0])") == str(2**20)


def test_the_plugins_entry_point_raises_it_without_mlx():
    told = "print(os.environ.get('MLX_MAX_MB_PER_BUFFER'), 'mlx' in sys.modules)"
    script = f"import os, sys, vllm_metal\nvllm_metal.register()\n{told}"
    assert alone(script) == f"{2**20} False"
    assert alone(script, VLLM_METAL_DEVICE="cpu") == "None False"
    assert alone(script, MLX_MAX_MB_PER_BUFFER="64") == "64 False"


def test_whoever_imports_mlx_first_can_be_told():
    late = (
        "import vllm_metal\nfrom metal_kernels import command_buffers\nvllm_metal.register()\n"
        "print(command_buffers.may_be_too_late())"
    )
    assert alone(late) == "False"
    assert alone(f"import mlx.core\n{late}") == "True"
    assert alone(f"import mlx.core\n{late}", MLX_MAX_MB_PER_BUFFER="64") == "False"


BOUNDS = """
from metal_kernels.command_buffers import DISPATCHES_OF_A_LAYER, most_dispatches
from metal_kernels.pace import MOST_WORK, Pace, pace_of
pace = Pace()
works = range(0, MOST_WORK, MOST_WORK // 256)
print(
    most_dispatches() / DISPATCHES_OF_A_LAYER,
    max(work for work in works if pace_of(pace, 1, work) is None),
    max(rows for rows in range(4096) if pace_of(pace, rows, 0) is None),
)
"""


@pytest.mark.parametrize("dispatches", [None, pytest.param(84, marks=pytest.mark.more), 1000])
def test_what_shares_a_command_buffer_stays_below_what_one_may_hold(dispatches):
    """Bounds the work by dispatches, and the rows of paced steps."""
    variables = {} if dispatches is None else {"MLX_MAX_OPS_PER_BUFFER": str(dispatches)}
    layers, work, rows = map(float, alone(BOUNDS, **variables).split())
    assert layers == (dispatches or 50) / DISPATCHES_OF_A_LAYER
    assert 0 < work * layers <= MOST_WORK
    # An 8B model's layer has 218 M weights; 2 FLOPs for each and row; 0.5 s of an M1 with 7 cores,
    # which does 2.3 TFLOP/s, at 60 %.
    assert 0 < rows * layers * 2 * 218e6 <= 0.5 * 0.6 * 2.3e12 * 1.05
    assert rows >= 256 or dispatches == 1000  # decode steps of vLLM's default --max-num-seqs


def test_dispatches_that_are_no_number_are_refused(monkeypatch):
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "many")
    with pytest.raises(ValueError, match="MLX_MAX_OPS_PER_BUFFER=many"):
        command_buffers.most_dispatches()
