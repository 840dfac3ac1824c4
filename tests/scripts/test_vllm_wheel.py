# SPDX-License-Identifier: Apache-2.0
"""The wheel made by scripts/vllm_wheel.py, and the installed one.

A folder stands for the package index. Nothing is built: the source's build ends with an error.
"""

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import vllm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "vllm_wheel.py"
PIN = ROOT / "requirements" / "vllm.txt"
MADE = "vllm-7.1.0+metal-py3-none-any.whl"
INFO = "vllm-7.1.0+metal.dist-info"
ABOUT = """\
Metadata-Version: 2.4
Name: vllm
Version: 7.1.0
License-File: LICENSE
Requires-Dist: Some.Thing[extra]<3,>=2; python_version > "3.11"
Requires-Dist: some-thing==2.5; platform_machine == "s390x"
Requires-Dist: opencv-python-headless>=4
Requires-Dist: torch==2.14.0
Requires-Dist: flashinfer-python==0.7
Provides-Extra: video
Provides-Extra: bench
Requires-Dist: torch; extra == "bench"
"""
DESCRIPTION = "\nRequires-Dist: torch\n\nVersion: 7.1.0\n"
PYTHON = {
    "vllm/__init__.py": "answer = 42\n",
    "vllm/cli.py": "from importlib.metadata import version\n\n\ndef main():\n"
    "    print(version('vllm'))\n",
    "vllm/deep/configs/a,b.json": "{}",
    "vllm/run.sh": "#!/bin/sh\n",
}
COMMAND = "[console_scripts]\nvllm = vllm.cli:main\n"
CONTENT = {
    "PKG-INFO": ABOUT + DESCRIPTION,
    "LICENSE": "a license",
    "csrc/kernels.cu": "C++",
    "pyproject.toml": '[build-system]\nrequires = ["torch"]\n'
    'build-backend = "setuptools.build_meta"\n',
    "setup.py": "raise SystemExit('nothing is built')\n",
    "requirements/common.txt": "# torch is named elsewhere\nsome_thing[extra] >= 2, < 3 # why\n"
    "some_thing == 2.5\nopencv-python-headless >= 4\n",
    "requirements/cuda.txt": "-r common.txt\ntorch==2.14.0\nflashinfer-python==0.7\n",
    "tests/test_vllm.py": "",
    **PYTHON,
    "vllm.egg-info/PKG-INFO": ABOUT,
    "vllm.egg-info/entry_points.txt": COMMAND,
}


@pytest.fixture
def source(tmp_path):
    """Makes a source in a folder that can be an index; the pin is beside it."""
    path = tmp_path / "index" / "vllm-7.1.0.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as made:
        for name, text in CONTENT.items():
            member = tarfile.TarInfo(f"vllm-7.1.0/{name}")
            member.size, member.mode = len(text), 0o775 if name.endswith(".sh") else 0o664
            made.addfile(member, io.BytesIO(text.encode()))
    pin(tmp_path, path.read_bytes())
    return path


def pin(folder, content):
    digest = hashlib.sha256(content).hexdigest()
    (folder / "vllm.txt").write_text(f"# The source.\nvllm==7.1.0 --hash=sha256:{digest}\n")


def make(tmp_path, folder="out", **variables):
    """Runs the script without a network."""
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    return subprocess.run(
        [sys.executable, SCRIPT, "--pin", tmp_path / "vllm.txt", tmp_path / folder],
        env=os.environ | offline | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def made(source, tmp_path):
    done = make(tmp_path, VLLM_SDIST=str(source))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'out' / MADE}\n"), done.stderr
    return tmp_path / "out" / MADE


def read(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def test_the_wheel_is_vllm_s_python_and_data_for_any_platform(made):
    files = {name: content.decode() for name, content in read(made).items()}
    assert {name: text for name, text in files.items() if not name.startswith(INFO)} == PYTHON
    assert files[f"{INFO}/entry_points.txt"] == COMMAND
    assert files[f"{INFO}/licenses/LICENSE"] == "a license"
    about = Parser().parsestr(files[f"{INFO}/WHEEL"])
    assert (about["Root-Is-Purelib"], about.get_all("Tag")) == ("true", ["py3-none-any"])
    assert len(files) == len(PYTHON) + 5


def test_it_requires_what_all_of_vllm_s_platforms_do(made):
    """Its extras stay, and packages that vLLM runs without become an extra."""
    about = Parser().parsestr(read(made)[f"{INFO}/METADATA"].decode())
    assert (about["Name"], about["Version"]) == ("vllm", "7.1.0+metal")
    assert about.get_all("Requires-Dist") == [
        'Some.Thing[extra]<3,>=2; python_version > "3.11"',
        'some-thing==2.5; platform_machine == "s390x"',
        'opencv-python-headless>=4; extra == "video"',
        'torch; extra == "bench"',
    ]
    assert about.get_payload() == DESCRIPTION.removeprefix("\n")


def test_its_record_names_each_file_with_its_hash_and_size(made):
    files = read(made)
    *rows, last = csv.reader(files[f"{INFO}/RECORD"].decode().splitlines())
    assert last == [f"{INFO}/RECORD", "", ""]
    assert [row[0] for row in rows] == list(files)[:-1]
    for path, digest, size in rows:
        hashed = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).decode()
        assert digest == f"sha256={hashed.rstrip('=')}", path
        assert int(size) == len(files[path]), path


def test_the_wheel_library_finds_it_whole(made, tmp_path):
    command = [sys.executable, "-m", "wheel", "unpack", made, "--dest", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "vllm-7.1.0+metal" / "vllm" / "__init__.py").exists()


def test_it_is_the_same_bytes_each_time(made, source, tmp_path):
    os.utime(source, (1, 1))
    assert make(tmp_path, "again", VLLM_SDIST=str(source)).returncode == 0
    assert (tmp_path / "again" / MADE).read_bytes() == made.read_bytes()


def test_it_is_made_of_what_pip_finds_without_a_build(source, tmp_path):
    done = make(tmp_path, PIP_FIND_LINKS=str(source.parent))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'out' / MADE}\n"), done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [MADE]


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.more)])
def test_an_index_without_the_pinned_source_is_an_error(source, tmp_path, there):
    pin(tmp_path, b"another")
    if not there:
        source.unlink()
    done = make(tmp_path, PIP_FIND_LINKS=str(source.parent))
    assert (done.returncode, done.stdout) == (1, "")
    assert "vllm_wheel: pip does not get vLLM 7.1.0's source distribution" in done.stderr


def test_a_copy_of_another_hash_is_refused(source, tmp_path):
    source.write_bytes(source.read_bytes() + b"\n")
    done = make(tmp_path, VLLM_SDIST=str(source))
    assert (done.returncode, done.stdout) == (1, "")
    assert hashlib.sha256(source.read_bytes()).hexdigest() in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.more
def test_pip_installs_it_and_takes_it_out(made, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    empty = set(environment.rglob("*"))
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python"]
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "install", *options, made], check=True)
    (script,) = environment.glob("lib/python*/site-packages/vllm/run.sh")
    assert os.access(script, os.X_OK)
    command = [environment / "bin" / "vllm"]
    assert subprocess.check_output(command, text=True) == "7.1.0+metal\n"
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "vllm"], check=True)
    left = set(environment.rglob("*")) - empty
    assert {path for path in left if path.name != "__pycache__"} == set()


def test_the_installed_vllm_is_the_pinned_without_compiled_parts():
    pinned = re.search(r"^vllm==(\S+)", PIN.read_text(), re.MULTILINE)
    installed = importlib.metadata.distribution("vllm")
    assert installed.version == f"{pinned[1]}+metal"
    assert vllm.__version__ == pinned[1]
    suffixes = {path.suffix for path in installed.files}
    assert ".py" in suffixes and not suffixes & {".so", ".dylib", ".pyd"}
    required = {re.match(r"[\w-]+", line)[0] for line in installed.requires if "extra" not in line}
    assert {"transformers", "xgrammar"} <= required
    assert not any(
        name.startswith(("torch", "flashinfer", "nvidia", "triton")) for name in required
    )
