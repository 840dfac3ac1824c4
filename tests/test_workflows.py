# SPDX-License-Identifier: Apache-2.0
"""GitHub's jobs keep what they found where they fail; a release is tested before it is made."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.name: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_both_releases_of_macos_run_and_keep_the_report_where_a_step_fails():
    job = yaml.safe_load(WORKFLOWS["ci.yml"].read_text())["jobs"]["macos"]
    assert {"macos-15", "macos-26"} == set(job["strategy"]["matrix"]["os"])
    assert job["strategy"]["fail-fast"] is False
    (doctor,) = (step for step in job["steps"] if "vllm-metal doctor" in step.get("run", ""))
    report = re.search(r"--report (\S+)", doctor["run"])[1]
    # Without pipefail the step would have tee's exit status.
    assert "pipefail" in doctor["run"] and "| tee " in doctor["run"]
    (kept,) = (step for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    assert kept["if"] == "always()" and job["steps"][-1] is kept
    assert Path(report).match(kept["with"]["path"])
    assert "${{ matrix.os }}" in kept["with"]["name"]  # two artifacts may not have one name
    behind = job["steps"][job["steps"].index(doctor) + 1 : -1]
    assert behind and all(step["if"] == "${{ !cancelled() }}" for step in behind)


def test_a_tag_is_checked_and_tested_before_the_release_gets_the_files():
    workflow = yaml.safe_load(WORKFLOWS["release.yml"].read_text())
    assert workflow[True]["push"]["tags"] == ["v*"]  # YAML 1.1 reads `on` as a Boolean
    ran = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }
    assert ran["test"][0] == 'python scripts/release_tag.py check "$GITHUB_REF_NAME"'
    assert any(command.startswith("make test") for command in ran["test"])
    assert workflow["jobs"]["release"]["needs"] == "test"
    built, tried, noted, made = ran["release"][1:]
    assert built.startswith("make dist ") and "dist/install.sh" in tried
    (notes,) = re.findall(r"scripts/release_tag.py notes .* > (\S+)$", noted)
    assert f"--notes-file {notes} dist/*" in made
    # Of all workflows, this job alone may write.
    for file, path in WORKFLOWS.items():
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            may_write = "write" in str(job.get("permissions", ""))
            assert may_write == ((file, name) == ("release.yml", "release"))
