# SPDX-License-Identifier: Apache-2.0
"""vLLM still needs every change this plugin makes to it: without them, it does what each is for."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from darwin.run import run as run_on_mac
from vllm_patches import unpatched
from vllm_patches.unpatched import PROBES

from vllm_metal.vllm_patches import releases

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "vllm_metal" / "vllm_patches"
PROGRAM = Path(unpatched.__file__)
#: Modules that change nothing.
APART = {"__init__", "probe", "releases", "replacing", "step_result"}
#: Functions that tell something, and what a change puts in the place of another.
QUESTIONS = {
    "http_protocol.LimitedHttp",
    "processes.in_users_process",
    "processes.is_engine_process",
    "server_end.TurnAway",
    "shutdown.remembering_the_stop",
}


def needing(release, on_mac=False):
    """Changes that a release is said to need."""
    return [n for n, p in PROBES.items() if release in p.releases and p.on_mac == on_mac]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(unpatched.MODEL))
    return str(made)


def findings(stdout, stderr):
    told = [line for line in stdout.splitlines() if line.startswith("FOUND ")]
    assert told, stdout + stderr
    return json.loads(told[-1].removeprefix("FOUND "))


def without_changes(folder, names, *first):
    """What vLLM, of the first folder that has it, does in a process that changes nothing of it."""
    changed = {
        "PYTHONPATH": os.pathsep.join([*first, str(ROOT)]),
        "VLLM_METAL_DEVICE": "cpu",
        "VLLM_METAL_ALLOW_UNTESTED": "1",
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
    return without_changes(folder, needing(releases.TESTED_VLLM))


@pytest.fixture(scope="module")
def found_on_mac(folder):
    names = needing(releases.TESTED_VLLM, on_mac=True)
    if sys.platform == "darwin":
        return without_changes(folder, names)
    done = run_on_mac([PROGRAM, folder, *names])
    return findings(done.stdout, done.stderr)


def assert_needed(change, finding):
    assert finding["needed"], (
        f"vLLM no longer does what vllm_metal.vllm_patches.{change} is there for "
        f"({PROBES[change].run.__doc__}): delete the change and its probe, or correct the probe. "
        f"Found: {finding['found']}"
    )


@pytest.mark.more
@pytest.mark.parametrize("change", needing(releases.TESTED_VLLM))
def test_the_tested_vllm_needs(change, found):
    assert_needed(change, found[change])


@pytest.mark.more
@pytest.mark.parametrize("change", needing(releases.TESTED_VLLM, on_mac=True))
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
    modules = {path.stem for path in PATCHES.glob("*.py")} - APART
    offered = set().union(*map(public, modules))
    assert offered - QUESTIONS == PROBES.keys()
    assert offered >= QUESTIONS


def test_no_probe_is_for_releases_that_are_gone():
    for change, probe in PROBES.items():
        module = importlib.import_module(f"vllm_metal.vllm_patches.{change.partition('.')[0]}")
        assert set(probe.releases) <= set(module.RELEASES), change
        assert releases.TESTED_VLLM in probe.releases, f"delete {change}"


def test_without_changes_means_without_all_of_them():
    shims = {"partial_imports"}  # it chooses what to import
    modules = {change.partition(".")[0] for change in PROBES}
    assert set(unpatched.CHANGING) == modules - shims


#: Changes that are there in any process with an engine's configuration and scheduler.
MADE_AT_ONCE = (
    "cache_salts.send_salts",
    "engine_args.set_batch_defaults",
    "engine_args.accept_int8_kv_cache",
    "engine_args.cache_prefixes_of_states",
    "engine_args.fit_the_context",
    "kv_transfer.recompute_by_default",
    "logs.leave_out_what_clients_wrote",
    "logs.drop_unhelpful_warnings",
    "mlx_models.take_mlx_models",
    "model_info.TextModel",
    "model_info.answer_for_models",
    "prefill_chunks.end_chunks_within_blocks",
    "refusals.allow_min_p_and_logit_bias",
    "scheduler.end_failed_requests",
    "shutdown.let_engines_end",
    "shutdown.tell_a_stop_from_a_failure",
    "speculation.allow_lookup_methods",
    "stat_loggers.add_stat_logger",
    "step_budget.StepBudget",
    "streaming_sessions.end_failed_sessions",
    "streaming_sessions.keeping_sessions",
    "streaming_sessions.refuse_in_sessions",
    "streaming_sessions.serve_sessions",
    "torch_accelerator.answer_for_torch_accelerator",
)


@pytest.fixture(scope="module")
def found_with_changes(folder):
    return without_changes(folder, ["--applied", *MADE_AT_ONCE])


@pytest.mark.more
@pytest.mark.parametrize("change", MADE_AT_ONCE)
def test_what_a_change_is_for_does_not_happen_where_it_is_made(change, found_with_changes):
    """The change does its work, and its probe can say no."""
    finding = found_with_changes[change]
    assert not finding["needed"] and "does not fit" not in finding["found"], finding["found"]
