# SPDX-License-Identifier: Apache-2.0
"""Importing modules of mlx-vlm changes nothing elsewhere."""

import json
import subprocess
import sys

import pytest

from vllm_metal.patches.mlx_patches import mlx_vlm_families

_CHANGES = """
import json, os
from copy import deepcopy
from transformers import AutoProcessor
from transformers.models.lfm2_vl import processing_lfm2_vl as lfm2
from vllm_metal.patches.mlx_patches.mlx_vlm_families import family

def now():
    of_auto = AutoProcessor.__dict__["from_pretrained"]
    defaults = deepcopy(lfm2.Lfm2VlProcessorKwargs._defaults)
    return dict(os.environ), of_auto, dict(lfm2.Lfm2VlProcessor.__dict__), defaults

before = now()
modules = [family(name, "a test").__name__ for name in ("bert", "gpt_oss", "lfm2_vl", "molmo2")]
print(json.dumps([modules, now() == before]))
"""


@pytest.mark.more
def test_a_process_stays_as_it_is():
    """Starts a process, because this one may have imported mlx-vlm already."""
    ran = subprocess.run(
        [sys.executable, "-c", _CHANGES], capture_output=True, text=True, check=True
    )
    modules, unchanged = json.loads(ran.stdout.splitlines()[-1])
    assert modules == [
        f"mlx_vlm.models.{name}" for name in ("bert", "gpt_oss", "lfm2_vl", "molmo2")
    ]
    assert unchanged


def test_without_the_package_the_error_has_the_command(monkeypatch):
    monkeypatch.setattr(mlx_vlm_families, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"images of qwen3_vl.*pip install.*--no-deps.*mlx-vlm"):
        mlx_vlm_families.family("qwen3_vl", "serving images of qwen3_vl")


_PLANS = """
from vllm_metal.patches.vllm_patches.partial_imports import plan_only
plan_only()
from vllm_metal.patches.mlx_patches.mlx_vlm_families import family
print(family("inkling", "a test").Model.__module__)
"""


@pytest.mark.more
def test_a_family_with_processors_is_imported_where_vllm_only_plans():
    """transformers is a stub there, and mlx-audio is not installed."""
    ran = subprocess.run([sys.executable, "-c", _PLANS], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "mlx_vlm.models.inkling.inkling"
