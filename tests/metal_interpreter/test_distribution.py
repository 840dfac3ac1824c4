# SPDX-License-Identifier: Apache-2.0
"""The interpreter is a separate distribution, absent from users' installs."""

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUFFIXES = {".py", ".h", ".cpp", ""}  # of the headers Metal's programs include: none


def build(project, target, folder):
    """Returns the only file that hatchling builds of a project; needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True, timeout=300)
    (made,) = folder.iterdir()
    return made


def files_of(package):
    """Returns its files in the clone, named as in a wheel."""
    return {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return zipfile.ZipFile(build(ROOT, "wheel", tmp_path_factory.mktemp("wheel")))


def test_the_users_wheel_holds_the_plugin_and_its_kernels_alone(wheel):
    names = wheel.namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"vllm_metal", "metal_kernels"}
    assert not [name for name in names if "metal_interpreter" in name]
    assert "metal_kernels/kv_write/kv_write.metal" in names


def test_nothing_asks_an_index_for_the_interpreters_name(wheel):
    (about,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    required = message_from_bytes(wheel.read(about)).get_all("Requires-Dist")
    (ours,) = [line for line in required if line.startswith("vllm-metal")]
    address = (ROOT / "interpreter").as_uri()
    assert ours == f"vllm-metal-interpreter @ {address} ; extra == 'interpreter'"


def test_the_source_archive_has_no_interpreter_either(tmp_path):
    with tarfile.open(build(ROOT, "sdist", tmp_path)) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
    assert "metal_kernels/kernel.py" in names
    assert not [name for name in names if name.startswith(("interpreter", "metal_interpreter"))]


def test_the_interpreters_wheel_holds_its_headers_and_runtime(tmp_path):
    with zipfile.ZipFile(build(ROOT / "interpreter", "wheel", tmp_path)) as made:
        held = {name for name in made.namelist() if ".dist-info/" not in name}
        (about,) = [name for name in made.namelist() if name.endswith(".dist-info/METADATA")]
        required = message_from_bytes(made.read(about)).get_all("Requires-Dist")
    assert held == files_of(ROOT / "interpreter" / "metal_interpreter")
    assert {"metal_interpreter/shim/metal_stdlib", "metal_interpreter/runtime/check.cpp"} <= held
    assert any(line.startswith("ziglang") for line in required)
    assert not any(line.startswith("vllm-metal") for line in required)
