# SPDX-License-Identifier: Apache-2.0
"""GitHub's jobs keep their results on failure; releases are tested first."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from vllm_metal.cli.options import parser

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.name: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def jobs(name):
    return yaml.safe_load(WORKFLOWS[name].read_text())["jobs"]


MACOS = jobs("ci.yml")["macos"]
#: A program that writes the report it is asked for, and ends as the test says.
DOUBLE = """\
#!/bin/bash
echo "${0##*/} $*" >>calls
while [ $# -gt 0 ]; do [ "$1" != --report ] || echo '{}' >"$2"; shift; done
exit "${STATUS:-0}"
"""


def test_both_releases_of_macos_run_and_keep_the_report_where_a_step_fails():
    systems = MACOS["strategy"]["matrix"]["include"]
    assert {"macos-15", "macos-26"} == {system["os"] for system in systems}
    assert MACOS["strategy"]["fail-fast"] is False
    (kept,) = (step for step in MACOS["steps"] if "upload-artifact" in step.get("uses", ""))
    assert kept["if"] == "always()" and MACOS["steps"][-1] is kept
    assert "${{ matrix.os }}" in kept["with"]["name"]  # two artifacts may not have one name


def test_on_macos_kernels_are_asked_strictly_and_first_and_nothing_behind_blocks():
    steps = [step for step in MACOS["steps"] if "run" in step]
    (strict,) = (at for at, step in enumerate(steps) if step.get("name") == "kernels")
    before, behind = steps[:strict], steps[strict + 1 :]
    assert [step["run"].split()[0] for step in before] == ["make", "grep"]
    assert not any("if" in step or "continue-on-error" in step for step in steps[: strict + 1])
    for step in behind[:-1]:
        assert step["if"] == "${{ !cancelled() }}" and step["continue-on-error"] is True
    assert behind[-1]["if"] == "always()" and behind[-1]["run"].endswith("|| true")


def run_step(script, folder, **variables):
    """Runs a step like GitHub, with `bash -e`, in a clone with fake programs."""
    for program in (".venv/bin/vllm-metal", "bin/make"):
        path = folder / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(DOUBLE)
        path.chmod(0o755)
    search = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    environment = {"PATH": search, "HOME": str(folder / "home"), **variables}
    return subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=environment, check=False)


@pytest.mark.parametrize(
    "step", [step for step in MACOS["steps"] if "vllm-metal" in step.get("run", "")], ids=str
)
def test_a_report_is_kept_and_a_failure_told_through_the_pipe(step, tmp_path):
    for status in (0, 1):
        done = run_step(step["run"], tmp_path, STATUS=str(status))
        strict = not step["run"].endswith("|| true")
        assert done.returncode == (status if strict else 0)
    kept = MACOS["steps"][-1]["with"]["path"]
    for call in (tmp_path / "calls").read_text().splitlines() if strict else ():
        _, *arguments = call.split()
        args = parser().parse_args(arguments)  # options that there are
        assert args.report.match(kept) and (tmp_path / args.report).exists()
        assert args.report.with_suffix(".txt").name in {p.name for p in tmp_path.glob(kept)}


@pytest.mark.parametrize("tag", ["macosx_15_0_arm64", "macosx_26_0_arm64"])
def test_the_wheel_of_mlx_must_be_the_system_s(tag, tmp_path):
    (step,) = (step for step in MACOS["steps"] if "dist-info/WHEEL" in step.get("run", ""))
    wheel = tmp_path / ".venv/lib/python3.12/site-packages/mlx_metal-0.32.4.dist-info/WHEEL"
    wheel.parent.mkdir(parents=True)
    wheel.write_text(f"Tag: py3-none-{tag}\n")
    for system in MACOS["strategy"]["matrix"]["include"]:
        script = step["run"].replace("${{ matrix.wheel }}", system["wheel"])
        assert (run_step(script, tmp_path).returncode == 0) == (system["wheel"] == tag)


def test_macs_run_the_tests_that_fit_them_weekly():
    workflow = yaml.safe_load(WORKFLOWS["weekly.yml"].read_text())
    assert workflow[True]["schedule"]
    *_, tests, kept = workflow["jobs"]["macos"]["steps"]
    (report,) = re.findall(r"--junitxml (\S+)\"", tests["run"])
    assert tests["run"].startswith("make test-small ") and kept["if"] == "always()"
    assert kept["with"]["path"] == report


def test_actions_run_on_a_node_that_github_has():
    """These are the first majors that declare Node 24."""
    least = {"checkout": 5, "setup-python": 6, "setup-node": 5, "cache": 5}
    least |= {"upload-artifact": 6, "download-artifact": 7}
    for path in WORKFLOWS.values():
        for name, major in re.findall(r"uses: actions/([\w-]+)@v(\d+)$", path.read_text(), re.M):
            assert int(major) >= least[name], (path.name, name)


def test_a_tag_is_checked_and_tested_before_the_release_gets_the_files():
    workflow = yaml.safe_load(WORKFLOWS["release.yml"].read_text())
    assert workflow[True]["push"]["tags"] == ["v*"]  # YAML 1.1 reads `on` as a Boolean
    ran = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }
    assert ran["test"][0] == 'python scripts/release_tag.py check "$GITHUB_REF_NAME"'
    assert any(command.startswith("make test") for command in ran["test"])
    needed = {name: job.get("needs") for name, job in workflow["jobs"].items()}
    assert needed == {"test": None, "build": "test", "install": "build", "release": "install"}
    assert any(command.startswith("make dist ") for command in ran["build"])
    systems = workflow["jobs"]["install"]["strategy"]["matrix"]["os"]
    assert "macos-15" in systems and "dist/install.sh" in ran["install"][0]
    noted, made = ran["release"]
    (notes,) = re.findall(r"scripts/release_tag.py notes .* > (\S+)$", noted)
    assert f"--notes-file {notes} dist/*" in made
    # This job alone may write, in all workflows.
    for file, path in WORKFLOWS.items():
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            may_write = "write" in str(job.get("permissions", ""))
            assert may_write == ((file, name) == ("release.yml", "release"))
