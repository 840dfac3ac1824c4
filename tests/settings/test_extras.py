# SPDX-License-Identifier: Apache-2.0
"""Installation advice names genuine packages."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm_metal.settings import extras

ROOT = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)


def test_advised_packages_are_those_that_are_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, packages in extras.PACKAGES.items():
        assert list(packages) == declared["optional-dependencies"][extra]


def test_the_command_is_that_of_this_interpreter():
    command = f"{PYTHON} -m pip install 'gguf>=0.19' 'filelock>=3.20.3'"
    assert extras.install_advice("gguf") == command
    with pytest.raises(KeyError):
        extras.install_advice("absent")


def test_what_declares_too_much_is_installed_alone():
    command = f"{PYTHON} -m pip install --no-deps 'mlx-vlm>=0.7.10,<0.8'"
    assert extras.install_advice("vlm") == command


def test_an_environment_without_pip_is_uvs(monkeypatch):
    monkeypatch.setattr(extras.PathFinder, "find_spec", lambda name: None)
    command = f"uv pip install --python {PYTHON} 'gguf>=0.19' 'filelock>=3.20.3'"
    assert extras.install_advice("gguf") == command


def test_setuptools_can_be_imported_behind_the_advice():
    """torch imports it with vLLM, and its finder checks who asks for pip."""
    advise = "from vllm_metal.settings import extras; extras.install_advice('gguf')"
    subprocess.run([sys.executable, "-c", f"{advise}; import setuptools"], check=True)


def test_the_interpreter_is_installed_from_the_clone(monkeypatch, tmp_path):
    pip = f"{PYTHON} -m pip install"
    folder = ROOT / "interpreter"
    assert extras.install_advice("interpreter") == f"{pip} {shlex.quote(str(folder))}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_path = f"{project['name']} @ {{root:uri}}/{folder.name}"
    assert declared["optional-dependencies"]["interpreter"] == [by_path]
    monkeypatch.setattr(extras, "CLONE", tmp_path)  # as for a wheel, in site-packages
    advice = f"{pip} ./interpreter  (in a clone of the repository)"
    assert extras.install_advice("interpreter") == advice


def test_nothing_asks_an_index_for_our_name():
    # An index has another project's release under it.
    asked = re.compile(r"install( -\S+)* ['\"]?vllm-metal\b|['\"]vllm-metal\[")
    sources = ("vllm_metal", "metal_kernels", "interpreter", "scripts")
    folders = [ROOT / name for name in (*sources, "examples", "benchmarks", "docs")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        if path.suffix in (".py", ".md", ".sh", ".toml")
        for line in path.read_text().splitlines()
        if asked.search(line)
    ]
    assert not found
