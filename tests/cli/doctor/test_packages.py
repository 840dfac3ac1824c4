# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of vLLM's platform, installed packages, and MLX's import."""

import mlx.core as mx
import pytest
from cli.doctor.conftest import ended, ignore

import vllm_metal
from vllm_metal.cli.doctor import packages
from vllm_metal.patches.vllm_patches import releases

OURS = "metal (vllm_metal:register)"


def test_our_platform_is_well():
    found = packages.check_platform(ended(platform=vllm_metal.PLATFORM, plugins=[OURS]))
    assert found.status == "ok"


@pytest.mark.parametrize(
    "plugins, variables, advice",
    [
        ([OURS], {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other leaves this plugin out"),
        ([OURS], {"VLLM_TARGET_DEVICE": "cpu"}, "VLLM_TARGET_DEVICE=cpu makes vLLM ignore plugins"),
        (["other (other:register)"], {}, "Install vllm-metal"),
        ([OURS, "other (other:register)"], {}, "VLLM_PLUGINS=metal"),
    ],
)
def test_another_platform_fails_and_is_named(monkeypatch, plugins, variables, advice):
    for name in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = packages.check_platform(ended(platform="other.Platform", plugins=plugins))
    assert found.status == "failed"
    assert "other.Platform" in found.seen and plugins[0] in found.seen
    assert advice in found.advice


def test_a_vllm_that_does_not_import_shows_its_last_lines():
    lines = ("RuntimeError: Only one platform plugin can be activated, but got: ['metal', 'b']",)
    asked = ended(1, lines, stage="importing vLLM", plugins=[OURS, "b (b:register)"])
    found = packages.check_platform(asked)
    assert found.status == "failed"
    assert "Only one platform plugin" in found.seen and "VLLM_PLUGINS=metal" in found.advice


def test_an_untested_vllm_fails_and_an_allowed_one_is_warned_of(monkeypatch):
    assert packages.check_versions().status == "ok"
    monkeypatch.setattr(releases, "installed_vllm", lambda: "9.9.0")
    monkeypatch.delenv("VLLM_METAL_ALLOW_UNTESTED", raising=False)
    found = packages.check_versions()
    assert found.status == "failed" and "9.9.0" in found.seen
    monkeypatch.setenv("VLLM_METAL_ALLOW_UNTESTED", "1")
    assert packages.check_versions().status == "warning"


GOOD = {
    "metal_inside": True,
    "platform": vllm_metal.PLATFORM,
    "transformers": "5.13.0",
    "product": 64.0**3,
}


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mlx_computes_in_a_process_with_all_imports(run_here, monkeypatch, processes):
    if not processes:
        monkeypatch.setattr(packages, "run", run_here)
    tried = packages.try_in_vllm(ignore)
    found = packages.check_in_vllm(tried, metal=mx.metal.is_available())
    assert found.status == "ok", (found.seen, *tried.lines)
    assert tried.reported["product"] == 262144
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
    assert packages.check_in_vllm(ended(**GOOD), metal=True).status == "ok"
    found = packages.check_in_vllm(ended(**GOOD | wrong), metal=True)
    assert found.status == "failed" and seen in found.seen
    assert "transformers" in found.advice


def test_without_metal_alone_none_is_missed_inside():
    assert (
        packages.check_in_vllm(ended(**GOOD | {"metal_inside": False}), metal=False).status == "ok"
    )


def test_a_process_that_crashes_is_a_failure(script):
    text = "import os\nsend_message(stage='importing what an engine imports')\nos.abort()\n"
    found = packages.check_in_vllm(packages.try_in_vllm(ignore, script(text)), metal=True)
    assert found.status == "failed" and "SIGABRT" in found.seen
