# SPDX-License-Identifier: Apache-2.0
"""vLLM still needs every change this plugin makes to it: without them, it does what each is for."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from darwin.run import run as run_on_mac
from vllm_patches import unpatched
from vllm_patches.unpatched import PROBES

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "vllm_metal" / "vllm_patches"
PROGRAM = Path(unpatched.__file__)
#: Functions that tell something, and what a change puts in the place of another.
QUESTIONS = {
    "cached_blocks.CacheChanges",
    "cached_blocks.CachedBlocks",
    "engine_sleep.Engine",
    "engine_sleep.Keeper",
    "engine_sleep.is_kept",
    "first_mistake.parts",
    "http_protocol.LimitedHttp",
    "image_names.set_owner",
    "known_causes.as_written",
    "known_causes.in_one_line",
    "known_causes.of_fields",
    "known_causes.of_message",
    "known_causes.raised_in",
    "media_loading.CountImages",
    "media_loading.ImageMemory",
    "media_loading.around",
    "memory_shares.given",
    "model_info.Keys",
    "processes.in_users_process",
    "prompts.Watcher",
    "prompts.begin_request",
    "processes.is_engine_process",
    "refused_arguments.told",
    "replicas.is_rank",
    "request_sizes.num_choices",
    "request_sizes.num_texts",
    "request_sizes.size_of_grammar",
    "scheduler.next_image",
    "server_end.TurnAway",
    "shutdown.ignore_ctrl_c",
    "shutdown.remembering_the_stop",
    "start_failures.StartError",
    "start_failures.cause",
    "start_failures.print_causes",
    "start_failures.tell",
    "start_log.chosen_by_the_user",
    "unknown_fields.around",
}


EVERYWHERE = [name for name, probe in PROBES.items() if not probe.on_mac]
ON_MAC = [name for name, probe in PROBES.items() if probe.on_mac]
#: Changes that are there in any process with an engine's configuration and scheduler.
MADE_AT_ONCE = [name for name, probe in PROBES.items() if probe.at_once]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(unpatched.MODEL))
    return str(made)


def findings(stdout, stderr):
    told = [line for line in stdout.splitlines() if line.startswith("FOUND ")]
    assert told, stdout + stderr
    return json.loads(told[-1].removeprefix("FOUND "))


def without_changes(folder, names):
    """What vLLM does in a process that changes nothing of it."""
    changed = {
        "PYTHONPATH": str(ROOT),
        "VLLM_METAL_DEVICE": "cpu",
        # Whatever tests before this one have set. vLLM turns the second on by itself, in the
        # environment, for architectures it has a list of (DeepSeek's), and then warns of less.
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "0",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM), folder, *names],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return findings(done.stdout, done.stderr)


@pytest.fixture(scope="module")
def found(folder):
    return without_changes(folder, EVERYWHERE)


@pytest.fixture(scope="module")
def found_on_mac(folder):
    if sys.platform == "darwin":
        return without_changes(folder, ON_MAC)
    done = run_on_mac([PROGRAM, folder, *ON_MAC])
    return findings(done.stdout, done.stderr)


def assert_needed(change, finding):
    assert finding["needed"], (
        f"vLLM no longer does what vllm_metal.vllm_patches.{change} is there for "
        f"({PROBES[change].run.__doc__}): delete the change and its probe, or correct the probe. "
        f"Found: {finding['found']}"
    )


@pytest.mark.parametrize("change", EVERYWHERE)
def test_the_tested_vllm_needs(change, found):
    assert_needed(change, found[change])


@pytest.mark.parametrize("change", ON_MAC)
def test_on_macos_the_tested_vllm_needs(change, found_on_mac):
    assert_needed(change, found_on_mac[change])


def public(module):
    """What a module of vllm_patches offers: "module.name", or "module" where it only imports."""
    tree = ast.parse((PATCHES / f"{module}.py").read_text())
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    return {f"{module}.{name}" for name in names} or {module}


def test_every_change_has_a_probe():
    modules = {path.stem for path in PATCHES.glob("*.py")} - unpatched.APART
    offered = set().union(*map(public, modules))
    assert offered - QUESTIONS == PROBES.keys()
    assert offered >= QUESTIONS


@pytest.fixture(scope="module")
def found_with_changes(folder):
    return without_changes(folder, ["--applied", *MADE_AT_ONCE])


@pytest.mark.parametrize("change", MADE_AT_ONCE)
def test_what_a_change_is_for_does_not_happen_where_it_is_made(change, found_with_changes):
    """The change does its work, and its probe can say no."""
    finding = found_with_changes[change]
    assert not finding["needed"] and "does not fit" not in finding["found"], finding["found"]
