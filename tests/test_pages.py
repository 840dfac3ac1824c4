# SPDX-License-Identifier: Apache-2.0
"""Commands of the pages run as printed, links resolve, variables are documented."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from metal_kernels.cache import cache_dir
from vllm_metal.cli import fit
from vllm_metal.cli import main as cli
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
"git clone") mkdir "$3" ;;
"vllm-metal model") echo models/embedded ;;
esac
true
"""


def section(page, heading):
    """Returns the text under a heading of the second level."""
    return page.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def block(page, heading):
    return re.search(r"```sh\n(.*?)```", section(page, heading), re.DOTALL).group(1)


def pasted(commands, folder):
    """Returns the calls that `commands` make in a shell with fake programs."""
    doubles, calls = folder / "doubles", folder / "calls"
    doubles.mkdir()
    for name in ("curl", "git", "make", "python", "uv", "vllm", "vllm-metal"):
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


def test_the_readme_s_commands_clone_set_up_and_serve_this_machine_alone(tmp_path):
    clone, setup, _, serve = pasted(block(README, "Install"), tmp_path)
    assert clone[:2] == ["git", "clone"]
    assert setup == ["make", "setup"]
    assert serve[:3] == ["vllm", "serve", "models/embedded"]
    assert serve[-2:] == ["--host", "127.0.0.1"]


def test_pages_clone_from_the_address_that_the_package_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project.get("urls", {}).get("Repository", "ADDRESS")
    given = {found for page in PAGES for found in re.findall(r"git clone (\S+)", page.read_text())}
    assert given == {address}


def test_the_block_runs_whole_and_installs_the_pinned(tmp_path):
    made = pasted(block(INSTALL, "On a Mac"), tmp_path)
    assert ["uv", "venv", "--python", "3.12", "--seed"] in made
    (install,) = [call for call in made if call[:3] == ["uv", "pip", "install"]]
    options = ["--no-deps", "--requirement", "requirements/macos.txt"]
    assert install[3:] == [*options, ".", "build/vllm.whl"]
    making = made.index(["python", "scripts/vllm_wheel.py", "build"])
    assert making < made.index(install), "the wheel is made before packages are fetched"
    assert made[-1][:2] == ["vllm", "serve"]


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
    monkeypatch.setattr(cli.early_checks, "check_model", lambda *args, **options: None)
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
    """Returns the anchors of a page's headings, as on GitHub."""
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
