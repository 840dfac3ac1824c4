# SPDX-License-Identifier: Apache-2.0
"""The README's block for users: pasted whole, it installs what is pinned."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from metal_kernels.cache import cache_dir

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# Notes its call; `uv venv` makes an environment whose commands are notes as well.
DOUBLE = """\
#!/bin/bash
printf '%s\\n' "$(basename "$0")" "$@" END >>"$CALLS"
[ "$(basename "$0")" = uv ] && [ "$1" = venv ] && mkdir -p .venv/bin && touch .venv/bin/activate
true
"""


def block():
    section = README.partition("## Install\n")[2].partition("\n## ")[0]
    return re.search(r"```sh\n(.*?)```", section, re.DOTALL).group(1)


def requirement():
    """vLLM's wheel for macOS as the one line that holds it names it."""
    lines = (ROOT / "requirements" / "vllm-macos.txt").read_text().splitlines()
    (line,) = [line for line in lines if not line.startswith("#")]
    return line


def test_the_block_runs_whole_and_installs_the_pinned(tmp_path):
    for name in ("curl", "uv", "vllm"):
        (tmp_path / name).write_text(DOUBLE)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    subprocess.run(
        ["bash", "-eu"],
        input=block(),
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(calls), "HOME": str(tmp_path)},
    )
    made = [call.splitlines() for call in calls.read_text().split("END\n") if call]
    assert ["uv", "venv", "--python", "3.12", "--seed"] in made
    (install,) = [call for call in made if call[:3] == ["uv", "pip", "install"]]
    options = ["--no-deps", "--requirement", "requirements/macos.txt"]
    assert install[3:] == [*options, ".", requirement()]
    assert made[-1][:2] == ["vllm", "serve"]


def test_no_other_address_of_the_wheel_is_given():
    address = requirement().partition(" @ ")[2]
    assert set(re.findall(r"https://[^\s'\"`)]+\.whl", README)) == {address}


@pytest.mark.parametrize("system", ["darwin", "linux"])
def test_the_folder_that_stays_is_the_one_in_use(monkeypatch, system):
    for name in ("VLLM_METAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", system)
    uninstalling = README.partition("**To uninstall**")[2].partition("\n## ")[0]
    assert f"`~/{cache_dir().relative_to(Path.home())}`" in uninstalling
