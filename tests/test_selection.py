# SPDX-License-Identifier: Apache-2.0
"""Every test is run by one of the commands, and docs/testing.md says by which."""

import re
from pathlib import Path

import pytest
from selection import COLLECTED, COMMANDS, TESTS, rows

ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()


def commands_in(makefile: str) -> dict[str, str]:
    """Expressions after -m, by target, of those that run pytest over all files."""
    lines = re.findall(r"^(test[a-z-]*):.*\n\t\$\(PYTEST\)(.*)", makefile, re.MULTILINE)
    found = {}
    for target, arguments in lines:
        chosen = re.search(r"-m (?:'([^']+)'|(\w+))", arguments)
        found[f"make {target}"] = (chosen[1] or chosen[2]) if chosen else ""
    return found


def test_the_commands_divide_all_tests_among_them():
    default = re.search(r"addopts = .* -m '([\w ]+)'", (ROOT / "pyproject.toml").read_text())[1]
    found = commands_in((ROOT / "Makefile").read_text())
    assert tuple(found) == COMMANDS
    found["make test"] = found["make test"] or default
    for slow in (False, True):
        for more in (False, True):
            chosen = [
                c for c, wanted in found.items() if eval(wanted, {"slow": slow, "more": more})
            ]
            assert len(chosen) == 1, (slow, more, chosen)


def test_ci_runs_them():
    ci = (ROOT / ".ci" / "run").read_text()
    assert {"make test", "make test-more"} <= set(re.findall(r"make [a-z-]+", ci))
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert "make test-slow" in nightly and "schedule" in nightly


def test_the_page_lists_what_make_test_leaves_out(request: pytest.FixtureRequest):
    """For the files that this run collected whole."""
    config = request.config
    parts = {Path(argument.partition("::")[0]).name for argument in config.args if "::" in argument}
    items = config.stash[COLLECTED]
    expected = rows(item for item in items if item.path.name not in parts)
    listed = dict(re.findall(r"^(\| `([\w/.]+\.py)` \|.*)$", PAGE, re.MULTILINE))
    listed = {file: line for line, file in listed.items()}
    assert [file for file in listed if not (TESTS / file).exists()] == []
    collected = {item.path.relative_to(TESTS).as_posix() for item in items}
    assert {file: line for file, line in listed.items() if file in collected} == expected


def test_the_page_lists_every_folder():
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    listed = set(re.findall(r"^\| `tests/([\w]+)` \|", PAGE, re.MULTILINE))
    assert listed == {folder for folder in folders if not folder.endswith(".py")}
