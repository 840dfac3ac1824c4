# SPDX-License-Identifier: Apache-2.0
"""MLX beside all that an engine imports: for real, and as it failed elsewhere."""

import mlx.core as mx
import pytest
from commands.doctor.conftest import ended, ignore

import vllm_metal
from vllm_metal.commands.doctor import in_vllm

GOOD = {
    "metal_inside": True,
    "platform": vllm_metal.PLATFORM,
    "transformers": "5.13.0",
    "product": 64.0**3,
}


def test_mlx_computes_in_a_process_with_all_imports():
    tried = in_vllm.try_in_vllm(ignore)
    found = in_vllm.check(tried, metal=mx.metal.is_available())
    assert found.status == "ok", (found.seen, *tried.lines)
    assert tried.told["product"] == 262144
    assert "transformers 5." in found.seen
    assert not any("slow BLAS" in line for line in tried.lines)  # MLX came last, as in an engine


@pytest.mark.parametrize(
    "wrong, seen",
    [
        ({"metal_inside": False}, "not beside vLLM's imports (transformers 5.13.0)"),
        ({"platform": "vllm.platforms.cpu.CpuPlatform"}, "CpuPlatform once all is imported"),
        ({"product": 0.0}, "sums to 0, not 262144"),
    ],
)
def test_a_device_that_is_lost_by_imports_is_a_failure(wrong, seen):
    assert in_vllm.check(ended(**GOOD), metal=True).status == "ok"
    found = in_vllm.check(ended(**GOOD | wrong), metal=True)
    assert found.status == "failed" and seen in found.seen
    assert "transformers" in found.advice


def test_without_metal_alone_none_is_missed_inside():
    assert in_vllm.check(ended(**GOOD | {"metal_inside": False}), metal=False).status == "ok"


def test_a_process_that_crashes_is_a_failure(script):
    text = "import os\nsay(stage='importing what an engine imports')\nos.abort()\n"
    found = in_vllm.check(in_vllm.try_in_vllm(ignore, script(text)), metal=True)
    assert found.status == "failed" and "SIGABRT" in found.seen
