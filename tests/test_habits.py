# SPDX-License-Identifier: Apache-2.0
"""What GitHub and pre-commit read names commands, fields and files that are there."""

import re
import shlex
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
TEMPLATES = sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml"))
FORMS = [path for path in TEMPLATES if path.name != "config.yml"]
#: What a form may be made of: GitHub, "Syntax for GitHub's form schema".
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def hooks():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"], "nothing is fetched"
    return {hook["id"]: hook for hook in config["repos"][0]["hooks"]}


def test_hooks_are_what_make_lint_runs_and_quick_tests():
    makefile = (ROOT / "Makefile").read_text()
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1]
    called = [shlex.split(hook["entry"]) for hook in hooks().values()]
    of_lint = [shlex.split(line.replace("$(BIN)", ".venv/bin")) for line in lint.splitlines()]
    for command in of_lint:
        names = [word for word in command if not word.startswith("-") and word != "."]
        assert any(names == found[: len(names)] for found in called), command
    tests = [word for command in called for word in command if word.startswith("tests/")]
    assert tests and all((ROOT / test).is_file() for test in tests)


def test_hooks_take_only_what_set_up_installs():
    """By name: the developers' packages have commands of these names."""
    for hook in hooks().values():
        assert hook["language"] == "system"
        assert shlex.split(hook["entry"])[0] in (
            *(".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/python"),
        )


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_shows(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"] and form["body"]
    ids = [field["id"] for field in form["body"] if "id" in field]
    assert len(set(ids)) == len(ids)
    for field in form["body"]:
        assert field["type"] in KINDS
        wanted = "value" if field["type"] == "markdown" else "label"
        assert field["attributes"][wanted]
    asked = [field for field in form["body"] if field.get("validations", {}).get("required")]
    assert asked, "an empty form would do"


@pytest.mark.parametrize("name", ["bug", "model_refused"])
def test_a_form_about_a_failure_asks_for_the_doctor_s_report(name):
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    (doctor,) = (field for field in form["body"] if field.get("id") == "doctor")
    assert doctor["validations"]["required"]
    assert "vllm-metal doctor --report doctor.json" in doctor["attributes"]["description"]


def test_every_form_and_the_template_name_files_that_are_there():
    for path in (*TEMPLATES, GITHUB / "PULL_REQUEST_TEMPLATE.md"):
        text = path.read_text()
        named = re.findall(r"(?<![\w/])(?:tests|docs|scripts|vllm_metal)/[\w/.-]*\w", text)
        named += [link.partition("#")[0] for link in re.findall(r"blob/main/([^)]+)", text)]
        assert all((ROOT / name).exists() for name in named), path.name


def test_owners_are_of_folders_that_are_there():
    lines = [line.split() for line in (GITHUB / "CODEOWNERS").read_text().splitlines()]
    rules = [(words[0], words[1:]) for words in lines if words and words[0] != "#"]
    assert rules[0][0] == "*", "a change elsewhere is asked about, too"
    for pattern, owners in rules:
        assert pattern == "*" or (ROOT / pattern.strip("/")).exists(), pattern
        assert owners and all(fnmatch(owner, "@*/*") for owner in owners)
