# SPDX-License-Identifier: Apache-2.0
"""The plugin's changes of vLLM's environment variables."""

import os

import pytest
from vllm import envs
from vllm.platforms.interface import Platform

from vllm_metal.patches.vllm_patches import environment


def test_defaults_give_way_to_what_a_user_sets(monkeypatch):
    (first, *others) = environment.DEFAULTS
    monkeypatch.setenv(first, "its user's")
    for name in others:
        monkeypatch.delenv(name)
    environment.set_defaults()
    assert os.environ[first] == "its user's"
    assert {name: os.environ[name] for name in others} == {
        name: environment.DEFAULTS[name] for name in others
    }


def test_known_variables_pass_vllm_s_check_and_others_do_not(monkeypatch):
    monkeypatch.setattr(envs, "environment_variables", dict(envs.environment_variables))
    for name in [name for name in os.environ if name.startswith("VLLM_METAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_METAL_OF_THIS_TEST", "3")
    with pytest.raises(ValueError, match="VLLM_METAL_OF_THIS_TEST"):
        Platform.validate_environ(True)
    environment.make_known(["VLLM_METAL_OF_THIS_TEST", "VLLM_PORT"])
    Platform.validate_environ(True)
    assert envs.environment_variables["VLLM_METAL_OF_THIS_TEST"]() == "3"
    assert envs.environment_variables["VLLM_PORT"]() is None  # vLLM's own stays
