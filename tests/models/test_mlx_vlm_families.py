# SPDX-License-Identifier: Apache-2.0
"""Modules of mlx-vlm come without what importing them changes elsewhere."""

import json
import subprocess
import sys

import pytest

from vllm_metal.models import mlx_vlm_families

_CHANGES = """
import json, os
from transformers import AutoProcessor
from vllm_metal.models.mlx_vlm_families import family

def now():
    return dict(os.environ), AutoProcessor.__dict__["from_pretrained"]

before = now()
modules = [family(name, "a test").__name__ for name in ("bert", "gpt_oss", "molmo2")]
print(json.dumps([modules, now() == before]))
"""


def test_a_process_stays_as_it_is():
    """In a process of its own: others of this one may have imported mlx-vlm already."""
    ran = subprocess.run(
        [sys.executable, "-c", _CHANGES], capture_output=True, text=True, check=True
    )
    modules, unchanged = json.loads(ran.stdout.splitlines()[-1])
    assert modules == [f"mlx_vlm.models.{name}" for name in ("bert", "gpt_oss", "molmo2")]
    assert unchanged


def test_without_the_package_the_error_has_the_command(monkeypatch):
    monkeypatch.setattr(mlx_vlm_families, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"images of qwen3_vl.*pip install.*--no-deps.*mlx-vlm"):
        mlx_vlm_families.family("qwen3_vl", "serving images of qwen3_vl")
