# SPDX-License-Identifier: Apache-2.0
"""vLLM's planning with partial imports: equal results, errors for the rest."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest
from cli.fit.models import MODELS, OTHERS, write

from vllm_metal.cli.main import main

#: Packages that no answer of `fit` needs, and that take most of the import time.
DEAR = ("torch._inductor", "torch._dynamo", "transformers.modeling_utils", "vllm.multimodal.audio")
#: Layers of two kinds each, for vLLM to put into groups.
PLANNED = ("gemma3, windows", "qwen3_next, states", "gemma4, heads of two sizes")
#: Replaces MLX's measurement, which depends on how far it is ahead of the device.
PEAK = "lambda: mx.get_active_memory() + 2**20"
SCRIPT = f"""
import json, sys
from vllm_metal.patches.vllm_patches import partial_imports
partial_imports.plan_only()
from vllm_metal.cli.main import main
import mlx.core as mx
mx.get_peak_memory = {PEAK}
statuses = [main(line) for line in json.loads(sys.stdin.read())]
print(json.dumps({{"statuses": statuses, "modules": sorted(sys.modules)}}))
"""


def alone(script: str, given: str = "") -> str:
    """Returns the output of a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", script], input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def answers(printed: str) -> list[dict]:
    """Parses consecutive JSON texts."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(printed.rstrip()):
        value, end = decoder.raw_decode(printed[at:])
        found.append(value)
        at += end + 1
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(PLANNED, id="some", marks=pytest.mark.more),
        pytest.param(tuple(MODELS | OTHERS), id="all", marks=pytest.mark.slow),
    ],
)
def test_fit_answers_the_same_without_most_of_vllm(names, tmp_path, capsys, monkeypatch):
    folders = [str(write(tmp_path / str(index), name)) for index, name in enumerate(names)]
    lines = [["fit", folder, "--memory", "16GB", "--json"] for folder in folders]
    *told, said = answers(alone(SCRIPT, json.dumps(lines)))
    assert {name for name in DEAR if name in said["modules"]} == set()
    monkeypatch.setattr(mx, "get_peak_memory", eval(PEAK))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which the command would set for good
    statuses = [main(line) for line in lines]
    assert said["statuses"] == statuses
    assert told == answers(capsys.readouterr().out)


def test_whoever_calls_what_is_not_there_is_told_its_name():
    alone("""
from vllm_metal.patches.vllm_patches import partial_imports
partial_imports.plan_only()
from vllm import LLM
from vllm.config import VllmConfig
for call in (LLM, lambda: VllmConfig.no_such):
    try:
        call()
    except (ImportError, AttributeError) as error:
        assert "vllm" in str(error) and ("LLM" in str(error) or "VllmConfig" in str(error)), error
    else:
        raise AssertionError("a stub was used")
class Base(VllmConfig):
    pass
""")


@pytest.mark.slow
def test_nothing_changes_where_vllm_is_there_already():
    alone("""
import os
os.environ["VLLM_METAL_DEVICE"] = "cpu"
import vllm.config
from vllm_metal.patches.vllm_patches import partial_imports
partial_imports.plan_only()
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
assert vllm.config.VllmConfig.__module__ == "vllm.config.vllm"
""")
