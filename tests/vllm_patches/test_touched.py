# SPDX-License-Identifier: Apache-2.0
"""The table of touched names is complete: our own sources, read, touch nothing else of vLLM's."""

import ast
import dataclasses
import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest
from vllm.platforms.interface import Platform
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from vllm_metal.platform.metal_platform import MetalPlatform
from vllm_metal.vllm_patches import releases
from vllm_metal.vllm_patches.async_output import AsyncOutput
from vllm_metal.vllm_patches.step_result import StepResult
from vllm_metal.vllm_patches.touched import GPU_WORKER, TOUCHED
from vllm_metal.worker.worker import MetalWorker

PACKAGE = Path(__file__).parents[2] / "vllm_metal"
SOURCES = sorted(PACKAGE.rglob("*.py"))
NAMES = {entry.name for entry in TOUCHED}
MODULES = {name.partition(":")[0] for name in NAMES}
#: Attributes of a touched class by the last part of its name, which no two share.
ATTRIBUTES = defaultdict(set)
for touched in TOUCHED:
    ATTRIBUTES[touched.name.partition(":")[2]] |= {
        *touched.fields.split(),
        *touched.calls,
        *touched.methods,
    }
ATTRIBUTES["ModelRunnerOutput"] |= {field.name for field in dataclasses.fields(StepResult)}
#: What objects of vLLM's are called where we read them, in whatever they are kept.
HOLDS = {
    "vllm_config": "VllmConfig",
    "model_config": "ModelConfig",
    "draft_model_config": "ModelConfig",
    "cache_config": "CacheConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "speculative_config": "SpeculativeConfig",
    "load_config": "LoadConfig",
    "compilation_config": "CompilationConfig",
    "sampling_params": "SamplingParams",
    "scheduled_cached_reqs": "CachedRequestData",
    "kv_cache_manager": "KVCacheManager",
    "block_pool": "BlockPool",
}


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a name within a module that is no package
        return False


def imported(tree):
    """Names of vLLM's that a file imports wherever it does: (module, name), local name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield alias.name, None, alias.asname


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_import_is_in_the_table(file):
    tree = ast.parse(file.read_text())
    modules = {}  # by local name
    for module, name, local in imported(tree):
        if name is None:
            modules[local] = module
        elif f"{module}:{name}" not in NAMES:
            assert is_module(f"{module}.{name}"), f"{module}:{name}"
            modules[local] = f"{module}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None:
                known = node.attr in ATTRIBUTES[""] if f"{module}:" in NAMES else False
                assert known or f"{module}:{node.attr}" in NAMES, f"{module}:{node.attr}"


def class_of(expression, known):
    """The touched class that an expression is an object of, as far as its names tell."""
    if isinstance(expression, ast.Name):
        return known.get(expression.id) or HOLDS.get(expression.id)
    return HOLDS.get(expression.attr) if isinstance(expression, ast.Attribute) else None


def annotated(argument):
    """The class of an argument, itself or as in `X | None`."""
    kind = argument.annotation
    kind = kind.left if isinstance(kind, ast.BinOp) else kind
    return kind.id if isinstance(kind, ast.Name) else None


def functions(file):
    """Each function of a file, with the names of vLLM's that it may use."""
    tree = ast.parse(file.read_text())
    names = {name for _, name, _ in imported(tree)}
    return [(node, names) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def reads(function, names):
    """(touched class, attribute) of all that a function reads or sets."""
    arguments = [n for n in ast.walk(function) if isinstance(n, ast.arg)]
    known = {argument.arg: annotated(argument) for argument in arguments}
    known = {name: kind for name, kind in known.items() if kind in names & ATTRIBUTES.keys()}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            (target,) = node.targets[:1]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and (found := class_of(value, known)):
                    known[name.id] = found
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and (owner := class_of(node.value, known)):
            yield owner, node.attr


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_attribute_is_in_the_table(file):
    for function in functions(file):
        for owner, attribute in reads(*function):
            assert attribute in ATTRIBUTES[owner], f"{owner}.{attribute}"


def test_the_reading_of_our_sources_sees_what_it_should():
    """Else the test before could pass for having read nothing."""
    seen = defaultdict(set)
    for file in SOURCES:
        for function in functions(file):
            for owner, attribute in reads(*function):
                seen[owner].add(attribute)
    assert {"num_scheduled_tokens", "kv_cache_block_copies"} <= seen["SchedulerOutput"]
    assert {"suffix_decoding_min_token_prob", "parallel_drafting"} <= seen["SpeculativeConfig"]
    assert {"temperature", "bad_words_token_ids"} <= seen["SamplingParams"]
    assert len(seen) > 8


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        (MetalPlatform, Platform, ["vllm.platforms.interface:Platform"]),
        (MetalWorker, WorkerBase, ["vllm.v1.worker.worker_base:WorkerBase"]),
        (MetalWorker, Worker, ["vllm.v1.worker.worker_base:WorkerBase", f"{GPU_WORKER}:Worker"]),
        (AsyncOutput, AsyncOutput.__base__, ["vllm.v1.outputs:AsyncModelRunnerOutput"]),
    ],
)
def test_every_overridden_attribute_is_in_the_table(ours, theirs, names):
    listed = {
        attribute
        for entry in TOUCHED
        if entry.name in names
        for attribute in (*entry.methods, *entry.fields.split())
    }
    overridden = {name for name in vars(ours) if hasattr(theirs, name) and name[:2] != "__"}
    assert overridden - {"_abc_impl"} <= listed


def test_what_the_table_says_of_us_is_so():
    for entry in TOUCHED:
        for place in entry.by.split(" (")[0].split():
            assert (PACKAGE / place).exists(), entry
        assert set(entry.releases) <= set(releases.KNOWN_VLLM)
        assert any([entry.fields, entry.calls, entry.methods, not entry.name.endswith(":")])
