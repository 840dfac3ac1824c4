# SPDX-License-Identifier: Apache-2.0
"""touched.json is what the command makes of our sources, and lists what they use of vLLM."""

import ast
import difflib
import importlib.util

import pytest
from upstream.touched.make import make
from vllm.platforms.interface import Platform
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from vllm_metal.platform.metal_platform import MetalPlatform
from vllm_metal.vllm_patches import probe
from vllm_metal.worker.results import LateOutput
from vllm_metal.worker.worker import MetalWorker

PACKAGE = probe.FILE.parents[1]
ENTRIES = {entry.name: entry for entry in probe.table()}
COMMAND = "PYTHONPATH=tests .venv/bin/python -m upstream.touched"


@pytest.mark.slow
def test_the_file_is_up_to_date():
    before, now = probe.FILE.read_text().splitlines(), make().splitlines()
    if before != now:
        changed = difflib.unified_diff(before, now, "touched.json", "sources", lineterm="", n=0)
        pytest.fail("\n".join([f"run {COMMAND}", *changed]))


def imported():
    """Every import of vLLM's in our sources: file, module, name or None."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((file, node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((file, a.name, None) for a in node.names if a.name[:5] == "vllm.")


def test_every_import_is_listed_with_its_file():
    found = list(imported())
    assert len(found) > 200
    for file, module, name in found:
        listed = {f"{module}:{name or ''}", f"{module}.{name}:"} & ENTRIES.keys()
        assert any(file in ENTRIES[entry].by for entry in listed), (file, module, name)


def test_every_overridden_attribute_is_listed():
    worker_base, worker = "vllm.v1.worker.worker_base:WorkerBase", f"{probe.GPU_WORKER}:Worker"
    output = "vllm.v1.outputs:AsyncModelRunnerOutput"
    for ours, theirs, names in (
        (MetalPlatform, Platform, ["vllm.platforms.interface:Platform"]),
        (MetalWorker, WorkerBase, [worker_base]),
        (MetalWorker, Worker, [worker_base, worker]),
        (LateOutput, LateOutput.__base__, [output]),
    ):
        for name in vars(ours):
            if hasattr(theirs, name) and name[:2] != "__" and name != "_abc_impl":
                assert ENTRIES.keys() & {f"{of}.{name}" for of in names}, (ours, name)


@pytest.mark.parametrize(
    ("name", "by", "facts"),
    [
        # Fields of what a function's parameter is said to be, and of what is reached through it.
        ("vllm.v1.core.sched.output:SchedulerOutput.kv_cache_block_copies", "worker/", {}),
        ("vllm.config:SpeculativeConfig.suffix_decoding_min_token_prob", "spec_decode/", {}),
        ("vllm:SamplingParams.bad_words_token_ids", "sample/", {}),
        # Paths of a configuration in strings.
        ("vllm.config.offload:UVAOffloadConfig.cpu_offload_gb", "platform/refused_options.py", {}),
        # Methods that ours take the place of: by inheritance, by `replace`, by name.
        (
            "vllm.v1.worker.worker_base:WorkerBase.load_model",
            "worker/worker.py",
            {"takes": "* load_dummy_weights"},
        ),
        (
            "vllm.v1.core.sched.scheduler:Scheduler.schedule",
            "vllm_patches/scheduler.py",
            {"takes": "throttle_prefills"},
        ),
        (f"{probe.GPU_WORKER}:Worker.sleep", "worker/worker.py", {"takes": "level"}),
        # Calls, with names for what is given by place.
        (
            "vllm.v1.core.block_pool:BlockPool.get_cached_block",
            "vllm_patches/scheduler.py",
            {"called": ["block_hash kv_cache_group_ids"]},
        ),
        (
            "vllm.v1.outputs:DraftTokenIds",
            "worker/",
            {"called": ["req_ids draft_token_ids"]},
        ),
        (
            "vllm.v1.engine.async_llm:AsyncLLM.abort",
            "serving/deadline.py",
            {"called": ["request_id"]},
        ),
    ],
)
def test_the_reading_of_our_sources_sees(name, by, facts):
    assert any(file.startswith(by) for file in ENTRIES[name].by)
    for fact, value in facts.items():
        assert getattr(ENTRIES[name], fact) == value


def test_files_that_are_named_exist():
    for entry in ENTRIES.values():
        for file in entry.by:
            assert (PACKAGE / file).exists(), entry
        module = entry.name.partition(":")[0]
        assert importlib.util.find_spec(module), entry
