# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of vLLM's choice and of what is installed."""

import pytest
from commands.doctor.conftest import ended

import vllm_metal
from vllm_metal.commands.doctor import packages
from vllm_metal.vllm_patches import releases

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
    assert packages.check_touched(asked) is None


def test_changed_names_fail_and_a_probe_that_dies_too():
    found = packages.check_touched(ended(platform="p", changed=["vllm.a:b is not there"]))
    assert found is not None and found.status == "failed" and "vllm.a:b" in found.seen
    found = packages.check_touched(ended(-6, platform="p", stage="looking"))
    assert found is not None and found.status == "failed" and "SIGABRT" in found.seen
    found = packages.check_touched(ended(platform="p", changed=[]))
    assert found is not None and found.status == "ok"


def test_an_untested_vllm_fails_and_an_allowed_one_is_warned_of(monkeypatch):
    assert packages.check_versions().status == "ok"
    monkeypatch.setattr(releases, "installed_vllm", lambda: "9.9.0")
    monkeypatch.delenv("VLLM_METAL_ALLOW_UNTESTED", raising=False)
    found = packages.check_versions()
    assert found.status == "failed" and "9.9.0" in found.seen
    monkeypatch.setenv("VLLM_METAL_ALLOW_UNTESTED", "1")
    assert packages.check_versions().status == "warning"
