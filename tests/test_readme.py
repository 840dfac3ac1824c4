# SPDX-License-Identifier: Apache-2.0
"""The commands that the pages for users give: pasted whole, they install what is pinned."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from metal_kernels.cache import cache_dir
from vllm_metal.commands import cli, fit
from vllm_metal.settings import envs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
FOLDERS = ("benchmarks", "docs", "examples", "interpreter")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
# Notes its call; `uv venv` and `make setup` make an environment whose commands are notes as well.
DOUBLE = """\
#!/bin/bash
printf '%s\\n' "$(basename "$0")" "$@" END >>"$CALLS"
case "$(basename "$0") $1" in "uv venv" | "make setup")
    mkdir -p .venv/bin && touch .venv/bin/activate && cp "$0" .venv/bin/vllm ;;
"python scripts/vllm_wheel.py") echo build/vllm.whl ;;
esac
true
"""


def section(page, heading):
    """The text under a heading of the second level."""
    return page.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def block(page, heading):
    return re.search(r"```sh\n(.*?)```", section(page, heading), re.DOTALL).group(1)


def pasted(commands, folder):
    """The calls that `commands` make in a shell, with doubles of what they call."""
    doubles, calls = folder / "doubles", folder / "calls"
    doubles.mkdir()
    for name in ("curl", "make", "python", "uv", "vllm"):
        (doubles / name).write_text(DOUBLE)
        (doubles / name).chmod(0o755)
    subprocess.run(
        ["bash", "-eu"],
        input=commands,
        text=True,
        check=True,
        cwd=folder,
        env=os.environ
        | {"PATH": f"{doubles}:{os.environ['PATH']}", "CALLS": str(calls), "HOME": str(folder)},
    )
    return [call.splitlines() for call in calls.read_text().split("END\n") if call]


def requirement():
    """vLLM's wheel for macOS as the one line that holds it names it."""
    lines = (ROOT / "requirements" / "vllm-macos.txt").read_text().splitlines()
    (line,) = [line for line in lines if not line.startswith("#")]
    return line


def test_the_readme_s_line_for_a_mac_sets_up_and_serves(tmp_path):
    commands = block(README, "On a Mac")
    assert commands.count("\n") == 1
    setup, serve = pasted(commands, tmp_path)
    assert setup == ["make", "setup"]
    assert serve[:2] == ["vllm", "serve"]


def test_the_readme_s_two_commands_come_first_and_set_up_by_themselves():
    first = re.findall(r"^    make ([a-z]+)", README, re.MULTILINE)
    assert first == re.findall(r"^    make ([a-z]+)", section(README, "Two commands"), re.MULTILINE)
    assert first == ["demo", "test"] and README.index("## Two commands") < README.index("```sh")
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^demo: \$\(USERS_STAMP\)", makefile, re.MULTILINE)
    assert re.search(r"^test: lint\b", makefile, re.MULTILINE)
    assert re.search(r"^lint: \$\(STAMP\)", makefile, re.MULTILINE)


def test_the_readme_is_a_page_and_its_figures_are_those_of_the_measurements():
    assert README.count("\n") <= 90
    measured = section((ROOT / "docs" / "performance.md").read_text(), "Beside its peers")
    turns = {cells[0]: cells[1:] for cells in map(cells_of, measured.splitlines()) if cells}
    rows = re.findall(
        r"^\| (.+?) \| ([\d.]+) (\S+) \| ([\d.]+) \3 \| ([\d.]+) \|$", README, re.MULTILINE
    )
    assert len(rows) == 6
    for label, ours, unit, theirs, ratio in rows:
        pairs = [cells[:2] for cells in turns.values() if unit == "tok/s"]
        if unit == "ms":
            turn = int(re.search(r"turn (\d+)", label)[1])
            column = turns["turn"].index(str(turn))
            pairs = [[turns["vllm-metal"][column], turns["mlx-lm's server"][column]]]
        assert any(pair[0] == ours and pair[1].split()[0] == theirs for pair in pairs), label
        speeds = (float(ours), float(theirs)) if unit == "tok/s" else (float(theirs), float(ours))
        assert speeds[0] / speeds[1] == pytest.approx(float(ratio), rel=0.02), label
    losses = [label for label, *_, ratio in rows if float(ratio) < 1]
    assert losses, "it says where it is slower, too"


def cells_of(line):
    """The cells of a table's row; none where a line is not one."""
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


def test_the_block_runs_whole_and_installs_the_pinned(tmp_path):
    made = pasted(block(INSTALL, "On a Mac"), tmp_path)
    assert ["uv", "venv", "--python", "3.12", "--seed"] in made
    (install,) = [call for call in made if call[:3] == ["uv", "pip", "install"]]
    options = ["--no-deps", "--requirement", "requirements/macos.txt"]
    assert install[3:] == [*options, ".", "build/vllm.whl"]
    finding = made.index(["python", "scripts/vllm_wheel.py", "obtain", "build"])
    assert finding < made.index(install), "the wheel is found before packages are fetched"
    assert made[-1][:2] == ["vllm", "serve"]


def test_both_serve_the_same_model():
    serving = r"vllm serve (\S+)$"
    (model,) = re.findall(serving, block(README, "On a Mac"), re.MULTILINE)
    assert re.findall(serving, block(INSTALL, "On a Mac"), re.MULTILINE) == [model]


def test_no_other_address_of_the_wheel_is_given():
    address = requirement().partition(" @ ")[2]
    given = [re.findall(r"https://[^\s'\"`)]+\.whl", page.read_text()) for page in PAGES]
    assert {wheel for wheels in given for wheel in wheels} == {address}


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_the_folder_that_stays_is_the_one_in_use(monkeypatch, system):
    for name in ("VLLM_METAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", system)
    assert f"`~/{cache_dir().relative_to(Path.home())}`" in section(INSTALL, "Uninstall")


def test_every_make_target_that_pages_name_is_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        # At the start of a line of code, or of a piece of it.
        for target in re.findall(r"(?:`|^    )make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"


def test_the_commands_that_ask_whether_a_model_fits_are_whole(monkeypatch):
    taken = []
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")  # which the command would set for good
    double = SimpleNamespace(run=lambda args: taken.append(args) or 0)
    monkeypatch.setattr(fit, "command", double, raising=False)  # the real one imports vLLM
    pages = "\n".join([README, (ROOT / "docs" / "models.md").read_text()])
    asked = re.findall(r"^    vllm-metal (fit .*)$", pages, re.MULTILINE)
    assert len(asked) == 3
    for arguments in asked:
        assert cli.main(arguments.split()) == 0
    for args in taken:
        assert (args.memory, args.context, args.requests) == (24 << 30, 32768, 4)
    assert [args.pipeline_parallel_size for args in taken] == [None, None, 2]


def test_every_environment_variable_is_explained():
    rows = re.findall(r"^\| `(VLLM_METAL_\w+)` \|", SETTINGS, re.MULTILINE)
    assert sorted(rows) == sorted(envs.NAMES)


def anchors(page):
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_within_the_project_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"(?:\]\(|src=\")([^)\s\"]+)", page.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = page if not path else page.parent / path
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_the_picture_is_of_the_demo_as_it_is():
    drawn = html.unescape((ROOT / "docs" / "demo.svg").read_text())
    picture = drawn.replace("\N{NO-BREAK SPACE}", " ")
    script = (ROOT / "examples" / "demo.py").read_text()
    questions = re.findall(r'ScriptedTurn\("([^"]+)"', script)
    (verdict,) = re.findall(r'"(All answers are right[^"]*)"', script)
    assert len(questions) == 3
    for text in (*(f"you> {question}" for question in questions), verdict):
        assert text in picture
