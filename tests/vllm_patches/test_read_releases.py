# SPDX-License-Identifier: Apache-2.0
"""Releases that were read but are not the tested one: their sources, run with this plugin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from upstream import archive

from vllm_metal.models.embedded import embedded_model_path
from vllm_metal.vllm_patches import releases

pytestmark = pytest.mark.slow  # 45 MB to fetch, and an engine for each release

ROOT = Path(__file__).parents[2]
ENGINE = """
import sys
from vllm_metal.device import blas
blas.load()
import vllm
llm = vllm.LLM(sys.argv[1], max_model_len=256, kv_cache_memory_bytes=64 << 20, **eval(sys.argv[2]))
params = vllm.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
outputs = llm.generate(["The capital of France is", "one two three one two"], params)
print("RESULT", vllm.__version__, [list(output.outputs[0].token_ids) for output in outputs])
"""
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}


@pytest.fixture(scope="module", params=releases.READ_VLLM)
def tree(request):
    try:
        return archive.sources(request.param)
    except archive.UnavailableError as error:
        pytest.skip(str(error))


def run(arguments, *first):
    """stdout of a Python that finds packages in `first` before any other."""
    changed = {
        "PYTHONPATH": os.pathsep.join([*map(str, first), str(ROOT)]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_METAL_ALLOW_UNTESTED": "1",
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | changed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_sources_have_all_that_is_touched(tree):
    assert "has all that" in run(["-m", "vllm_metal.vllm_patches.probe"], tree)


@pytest.mark.parametrize("options", [{}, DRAFTS], ids=["plain", "drafts"])
def test_an_engine_of_it_gives_the_tokens_of_the_tested_one(tree, options):
    model = str(embedded_model_path(dequantize=True))
    results = [
        run(["-c", ENGINE, model, repr(options)], *first).split("RESULT ")[1].split(" ", 1)
        for first in ([], [tree])
    ]
    (tested, expected), (read, found) = results
    assert tested != read and found == expected


def test_its_scheduler_ends_failed_requests(tree):
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/e2e/test_failing_steps.py"], tree)
