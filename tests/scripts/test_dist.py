# SPDX-License-Identifier: Apache-2.0
"""Results of `make dist`: a wheel that works without a clone, and install.sh's files."""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from scripts.release import ROOT, copy_clone, make

ADDRESS = "https://releases.example/newest"


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    clone = copy_clone(tmp_path_factory.mktemp("clone"))
    (clone / "dist").mkdir()
    (clone / "dist" / "vllm_metal-0.0.1-py3-none-any.whl").write_text("an old one")
    return make(clone, ADDRESS)


@pytest.fixture(scope="module")
def wheel(release):
    (wheel,) = release.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def archive(release):
    """Returns names in the source archive, without its folder."""
    (path,) = release.glob("*.tar.gz")
    with tarfile.open(path) as opened:
        return {name.split("/", 1)[1] for name in opened.getnames()}


def test_the_sums_list_the_newest_files_and_no_others(release):
    lines = [line.split() for line in (release / "SHA256SUMS").read_text().splitlines()]
    files = {path.name: path.read_bytes() for path in release.iterdir() if path.suffix}
    assert {name: sum for sum, name in lines} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert files.keys() == {
        *(f"vllm_metal-{version}-py3-none-any.whl", f"vllm_metal-{version}.tar.gz", "install.sh")
    }


def test_the_wheel_holds_all_sources_kernels_and_the_license(wheel):
    found = set(zipfile.ZipFile(wheel).namelist())
    files = {
        str(path.relative_to(ROOT))
        for package in ("vllm_metal", "metal_kernels")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert any(name.endswith(".metal") for name in files)
    about = {name for name in found if ".dist-info/" in name}
    assert found - about == files
    assert {name.split("/", 1)[1] for name in about} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }


def test_the_wheel_names_no_folder_and_no_machine(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("METADATA")]
        text = opened.read(name).decode()
    about = Parser().parsestr(text)
    assert "file:" not in text and str(wheel.parents[1]) not in text
    assert set(about.get_all("Provides-Extra")) == {
        "bench",
        "chat",
        "embedded",
        "energy",
        "gguf",
        "redis",
        "vlm",
    }
    # vLLM is the host; an installer must not look for it, nor for us.
    wanted = {line.split()[0].split("=")[0] for line in about.get_all("Requires-Dist")}
    assert not any(name.startswith("vllm") for name in wanted)


def test_the_archive_holds_what_the_installer_takes(archive, release):
    assert {
        *("scripts/setup.sh", "scripts/install.sh", "scripts/vllm_wheel.py"),
        *("requirements/linux.txt", "requirements/macos.txt", "requirements/vllm.txt"),
        *("deploy/launchd/org.vllm-metal.server.plist", "examples/openai_client.py"),
    } <= archive
    # Whatever set-up reads is there: it runs in the archive's folder.
    read = [path for path in (ROOT / "requirements").rglob("*") if path.is_file()]
    read += [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in read} <= archive
    (path,) = release.glob("*.tar.gz")
    with tarfile.open(path) as opened:
        for member in opened.getmembers():
            if member.name.endswith(("pyproject.toml", "PKG-INFO")):
                assert b"file:" not in opened.extractfile(member).read()


def test_the_address_is_one_constant(release):
    lines = (release / "install.sh").read_text().splitlines()
    assert [line for line in lines if line.startswith("ADDRESS=")] == [f"ADDRESS={ADDRESS}"]
    assert (ROOT / "scripts" / "install.sh").read_text().count("\nADDRESS=\n") == 1


@pytest.mark.more
def test_the_wheel_works_installed_beside_vllm(wheel, tmp_path):
    """In its own environment, over this one's packages, away from the clone."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    folder = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    zipfile.ZipFile(wheel).extractall(folder)
    # Behind the wheel's. Not as a folder of .pth files: an editable install adds its clone by one.
    shared = sysconfig.get_path("purelib")
    Path(folder, "shared.pth").write_text(f"{shared}\n")
    code = """
        import metal_kernels, vllm_metal
        from importlib.metadata import entry_points
        plugins = entry_points(group="vllm.platform_plugins")
        (entry,) = {plugin.value for plugin in plugins if plugin.name == "metal"}
        from vllm.platforms import current_platform
        from metal_kernels import kernel
        print(vllm_metal.__file__, metal_kernels.__file__, entry, type(current_platform).__name__)
        from vllm_metal.cli.main import main
        main(["--version"])
    """
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", "\n".join(line.strip() for line in code.splitlines())],
        env=env | {"VLLM_METAL_DEVICE": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *_, places, version = done.stdout.splitlines()
    first, second, entry, platform = places.split()
    assert first.startswith(folder) and second.startswith(folder)
    assert (entry, platform) == ("vllm_metal:register", "MetalPlatform")
    assert version == wheel.name.split("-")[1]
