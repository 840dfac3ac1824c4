# SPDX-License-Identifier: Apache-2.0
"""GitHub's jobs fit their limits, and keep what they found where they fail."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.name: path for path in (ROOT / ".github" / "workflows").glob("*.yml")}
GITHUBS_LIMIT = 360  # minutes: GitHub, "Usage limits", for a job on GitHub's machines
MINUTES = {
    command: int(minutes)
    for command, minutes in re.findall(
        r"^\| `([^`]+)` \| (\d+) \|", (ROOT / "docs" / "testing.md").read_text(), re.MULTILINE
    )
}


def jobs() -> list[Any]:
    """Each job as it runs: one for each combination of a matrix."""
    found = []
    for file, path in WORKFLOWS.items():
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            for index, chosen in enumerate(combinations(job)):
                found.append(pytest.param(filled(job, chosen), id=f"{file}-{name}-{index}"))
    return found


def combinations(job: dict[str, Any]) -> list[dict[str, Any]]:
    matrix = job.get("strategy", {}).get("matrix", {})
    if "include" in matrix:
        return list(matrix["include"])
    found: list[dict[str, Any]] = [{}]
    for key, values in matrix.items():
        found = [{**chosen, key: value} for chosen in found for value in values]
    return found


def filled(value: Any, chosen: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: filled(item, chosen) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, chosen) for item in value]
    if isinstance(value, str):
        for key, item in chosen.items():
            value = value.replace(f"${{{{ matrix.{key} }}}}", str(item))
    return value


def commands(job: dict[str, Any]) -> list[str]:
    """The documented commands that a job runs, in order; every line of it has one, or is none."""
    found = []
    for step in job["steps"]:
        # Folded lines of one command are joined; a shell's settings take no time.
        for line in step.get("run", "").splitlines():
            if line.strip() and not line.startswith("set "):
                found.append(documented(line))
    return found


def documented(line: str) -> str:
    if target := re.search(r"\bmake ([a-z-]+)", line):
        assert f"make {target[1]}" in MINUTES, line
        return f"make {target[1]}"
    names = [name for name in MINUTES if not name.startswith("make ") and name in line]
    if not names and "pip install" in line.replace(" -m pip", " pip"):
        names = ["pip install"]
    assert len(names) == 1, f"docs/testing.md does not say how long it takes: {line}"
    return names[0]


@pytest.mark.parametrize("job", jobs())
def test_a_job_fits_its_limit_and_githubs(job: dict[str, Any]):
    limit = int(job["timeout-minutes"])
    wanted = commands(job)
    # Tests add the developers' part where no step before them has.
    if "make setup-dev" not in wanted and any("test" in command for command in wanted):
        wanted.append("make setup-dev")
    assert wanted and sum(MINUTES[command] for command in wanted) <= limit <= GITHUBS_LIMIT


def test_the_pages_say_the_same_of_make_test():
    first = (ROOT / "CONTRIBUTING.md").read_text()
    assert f"{MINUTES['make test']} minutes on two cores" in first
    page = (ROOT / "docs" / "testing.md").read_text()
    assert f"takes two cores {MINUTES['make test']} minutes" in page


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


def test_the_template_asks_for_the_report_and_has_the_commands():
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    asked = {field["id"]: field for field in template["body"] if "id" in field}
    assert asked["doctor"]["validations"]["required"]
    text = "\n".join(field["attributes"].get("description", "") for field in asked.values())
    for command in (
        "vllm-metal doctor --report doctor.json",
        "sw_vers",
        "iogpu.wired_limit_mb",
        "VLLM_METAL_KERNELS=mlx vllm serve",
        "MLX_DISABLE_COMPILE=1 vllm serve",
        "MLX_MAX_MB_PER_BUFFER=1048576 vllm serve",
        "mlx_lm generate",
        "time_starttransfer",
        "DiagnosticReports",
    ):
        assert command in text, command
