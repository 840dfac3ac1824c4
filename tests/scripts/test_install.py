# SPDX-License-Identifier: Apache-2.0
"""scripts/install.sh: first install, update, failures, rollback, removal.

It runs on doubles of a Mac and of a Linux machine: the PATH holds nothing but doubles and the plain
tools it needs, HOME is empty, and releases hold the real scripts and lock files. Each double notes
its call, and may kill the installer there. One slow test installs for real.
"""

import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.release import ROOT, copy_clone, make

from vllm_metal.patches.vllm_patches.releases import TESTED_VLLM

ADDRESS = "https://releases.example/newest"
TOOLS = (
    *(
        "awk",
        "basename",
        "bash",
        "cat",
        "chmod",
        "cksum",
        "cmp",
        "cp",
        "cut",
        "dirname",
        "du",
        "grep",
        "gzip",
    ),
    *(
        "head",
        "ln",
        "mkdir",
        "mktemp",
        "mv",
        "readlink",
        "rm",
        "rmdir",
        "sed",
        "sh",
        "sleep",
        "tail",
    ),
    *("tar", "touch"),
)
SUMS = [tool for tool in ("sha256sum", "shasum") if shutil.which(tool)][:1]
#: Notes the call; where that is the one of $KILL_AT, kills all that the installer is.
NOTED = """\
#!/bin/bash
echo "{name}: $*" >>"$CALLS"
case "{name}: $*" in *"${{KILL_AT:-nothing is called so}}"*) kill -${{SIGNAL:-9}} 0; sleep 5 ;; esac
case "{name}: $*" in *"${{FAIL_AT:-nothing is called so}}"*) echo "{name} fails" >&2; exit 3 ;; esac
"""
#: An interpreter. Its environments' programs are those of the wheel that is installed.
PYTHON = """\
made() {
    for word; do
        case "$word" in */vllm_metal-*.whl)
            version=${word##*/vllm_metal-}
            sed "s/VERSION/${version%%-*}/" "$DOUBLES/vllm-metal.program" >.venv/bin/vllm-metal
            cp "$DOUBLES/vllm.program" .venv/bin/vllm
            chmod +x .venv/bin/vllm-metal .venv/bin/vllm ;;
        esac
    done
}
case "$1" in
    -) [ MINOR -ge "$2" ] && [ MINOR -le "$3" ] ;;
    -c) case "$2" in *os.replace*)
            "$REAL_PYTHON" "$@"
            case "replaced ${4##*/}" in "${KILL_AT:-nothing}") kill -9 0; sleep 5 ;; esac ;;
        esac ;;
    -m) case "$2 $3" in
            "venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
            "pip install") made "$@" ;;
        esac ;;
    scripts/vllm_wheel.py) touch "$2/vllm-made.whl" && echo "$2/vllm-made.whl" ;;
esac
"""
UV = """\
case "$1" in
    venv) mkdir -p .venv/bin && cp "$DOUBLES/venv-python" .venv/bin/python ;;
    pip) .venv/bin/python -m pip install "$@" ;;
esac
"""
CURL = """\
while [ $# -gt 0 ]; do
    case "$1" in
        -o) out=$2; shift ;;
        https://*) url=$1 ;;
    esac
    shift
done
case "$url" in
    https://astral.sh/uv/install.sh)
        [ -n "${UV_TO_FETCH:-}" ] || exit 6
        echo 'mkdir "$UV_UNMANAGED_INSTALL"
            cp "$DOUBLES/fetched-uv" "$UV_UNMANAGED_INSTALL/uv"' >"$out" ;;
    ADDRESS/*) cp "$RELEASE/${url##*/}" "$out" || exit 22 ;;
    *) exit 6 ;;
esac
"""
PROGRAM = """\
case "$1" in
    --version) echo VERSION ;;
    fit) [ -z "${TOO_SMALL:-}" ] || { echo "no model fits" >&2; exit 1; }
        printf '%s\\n' "a report" "To serve it:" "  vllm serve a/model --max-model-len 8192" ;;
esac
"""


@dataclass
class Machine:
    """Fakes of a machine's programs, a user's home, and a release to install."""

    system: str
    folder: Path

    def __post_init__(self):
        for path in (self.doubles, self.home, self.release):
            path.mkdir()
        for tool in (*TOOLS, *SUMS):
            (self.doubles / tool).symlink_to(shutil.which(tool))
        mac = self.system == "Darwin"
        arch = "arm64" if mac else "x86_64"
        self.add("uname", f'[ "$1" = -m ] && echo {arch} || echo {self.system}\n')
        self.add("curl", CURL.replace("ADDRESS", ADDRESS))
        self.add("fetched-uv", UV, name="uv")
        self.add("venv-python", PYTHON.replace("MINOR", "12"), name="python")
        self.add("vllm-metal.program", PROGRAM, name="vllm-metal")
        starts = "true" if mac else '[ "${VLLM_METAL_DEVICE:-}" = cpu ]'
        self.add("vllm.program", f"{starts} && echo 7.8.9\n", name="vllm")
        if mac:
            self.add("sw_vers", "echo 15.5\n")
            self.add("xcode-select", "exit 2\n")
        else:
            self.add("python3", PYTHON.replace("MINOR", "11"), name="python")
        self.publish("1.0")

    @property
    def doubles(self):
        return self.folder / "doubles"

    @property
    def home(self):
        return self.folder / "a home"

    @property
    def release(self):
        return self.folder / "release"

    @property
    def root(self):
        return self.home / ".local/share/vllm-metal"

    def add(self, file, text, name=None):
        path = self.doubles / file
        path.write_text(NOTED.format(name=name or file) + text)
        path.chmod(0o755)
        return path

    def publish(self, version, text=""):
        """Publishes a new release."""
        shutil.rmtree(self.release)
        self.release.mkdir()
        with zipfile.ZipFile(self.release / f"vllm_metal-{version}-py3-none-any.whl", "w") as made:
            made.writestr("vllm_metal/__init__.py", text)
        with tarfile.open(self.release / f"vllm_metal-{version}.tar.gz", "w:gz") as made:
            for part in ("scripts", "requirements", "deploy", "examples"):
                made.add(ROOT / part, f"vllm_metal-{version}/{part}")
            made.addfile(tarfile.TarInfo(f"vllm_metal-{version}/vllm_metal"), io.BytesIO())
        script = (ROOT / "scripts" / "install.sh").read_text()
        (self.release / "install.sh").write_text(script)
        sums = [f"{digest(path)}  {path.name}\n" for path in sorted(self.release.iterdir())]
        (self.release / "SHA256SUMS").write_text("".join(sums))

    def install(self, *options, shell="sh", **variables):
        """Runs the script as piped from curl; returns its result and the fakes' calls."""
        calls = self.folder / "calls"
        calls.write_text("")
        done = subprocess.run(
            [shell, "-s", "--", *options],
            cwd=self.folder,
            input=(self.release / "install.sh").read_text(),
            env={
                "PATH": str(self.doubles),
                "HOME": str(self.home),
                "CALLS": str(calls),
                "DOUBLES": str(self.doubles),
                "RELEASE": str(self.release),
                "REAL_PYTHON": sys.executable,
                "TMPDIR": str(self.folder),
                "VLLM_METAL_SOURCE": ADDRESS,
                "UV_TO_FETCH": "yes" if self.system == "Darwin" else "",
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=300,
            start_new_session=True,
        )
        return done, calls.read_text().splitlines()

    def installed(self, **variables):
        done, calls = self.install(**variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done, calls

    def serves(self, name="vllm-metal"):
        """Returns the version of a command in ~/.local/bin."""
        program = self.home / ".local/bin" / name
        env = {"PATH": str(self.doubles), "CALLS": os.devnull, "VLLM_METAL_DEVICE": "cpu"}
        return subprocess.run(
            [program, "--version"], env=env, capture_output=True, text=True
        ).stdout

    def versions(self):
        return sorted(path.name for path in (self.root / "versions").iterdir())


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(params=["Darwin", pytest.param("Linux", marks=pytest.mark.slow)])
def machine(request, tmp_path):
    """Runs on one system, on both nightly; separate tests cover their differences."""
    return Machine(request.param, tmp_path)


@pytest.fixture(params=["Darwin", "Linux"])
def each_machine(request, tmp_path):
    return Machine(request.param, tmp_path)


@pytest.fixture
def mac(tmp_path):
    return Machine("Darwin", tmp_path)


@pytest.fixture
def linux(tmp_path):
    return Machine("Linux", tmp_path)


def index_of(calls, part):
    return next(i for i, call in enumerate(calls) if part in call)


def test_a_machine_with_nothing_gets_all_of_it(each_machine):
    machine = each_machine
    done, calls = machine.installed()
    assert machine.serves() == "1.0\n"
    assert machine.serves("vllm") == "7.8.9\n"
    assert machine.versions() == ["1.0-1"]
    assert (machine.root / "current/deploy/launchd").is_dir()
    # Ends with the command that serves.
    assert done.stdout.splitlines()[-1].strip() == "vllm serve a/model --max-model-len 8192"
    assert ("vllm serve $(vllm-metal model)" in done.stdout) == (machine.system == "Linux")
    assert "PyPI has another project named vllm-metal" in done.stdout
    # Nothing stays but what serves.
    assert not (machine.root / "lock").is_symlink()
    assert [path.name for path in machine.folder.glob("tmp*")] == []
    # The plugin is tried before it becomes the current one.
    assert index_of(calls, "vllm: --version") < index_of(calls, "os.replace")


def test_nobody_else_may_write_to_what_is_installed(mac):
    before = os.umask(0)
    try:
        _, calls = mac.installed()
    finally:
        os.umask(before)
    written = [path for path in mac.root.rglob("*") if not path.is_symlink()]
    assert not [path for path in written if path.stat().st_mode & 0o022]
    fetched = [call for call in calls if call.startswith("curl:")]
    assert len(fetched) == 4 and all("--proto =https " in call for call in fetched)


def test_no_index_is_ever_asked_for_our_name(each_machine):
    _, calls = each_machine.installed()
    ours = [call for call in calls if " install " in call and "vllm_metal" in call]
    assert ours and all(" --no-index " in call and "--no-deps" in call for call in ours)
    assert not any(word in ("vllm-metal", "vllm_metal") for c in calls for word in c.split()[1:])
    assert all("--no-deps" in call for call in calls if " install " in call)


def test_a_mac_without_apple_s_tools_opens_no_window(mac):
    """Its python3, make, git and cc are stubs that offer to install the tools."""
    for stub in ("python3", "make", "git", "cc"):
        mac.add(stub, "exit 1\n")
    done, calls = mac.installed()
    assert not any(call.startswith(("python3:", "make:", "git:", "cc:")) for call in calls)
    assert "xcode-select" not in done.stdout + done.stderr


def test_a_mac_s_uv_and_python_lie_in_our_folder(mac):
    mac.add("fetched-uv", UV + 'echo "uv keeps: $UV_CACHE_DIR $UV_PYTHON_INSTALL_DIR" >>"$CALLS"\n')
    _, calls = mac.installed()
    assert (mac.root / "uv/uv").is_file()
    kept = {call for call in calls if call.startswith("uv keeps")}
    assert kept == {f"uv keeps: {mac.root}/cache {mac.root}/python"}
    assert not any("astral" in call for call in mac.installed()[1])


def test_a_user_s_own_uv_is_used(mac):
    shutil.copy(mac.doubles / "fetched-uv", mac.doubles / "uv")
    _, calls = mac.installed()
    assert not any("astral" in call for call in calls)
    assert any(call.startswith("uv: venv") for call in calls)
    assert not (mac.root / "uv").exists()


def test_without_uv_linux_takes_a_python_with_venv(linux):
    done, calls = linux.installed()
    assert "cannot download uv" in done.stdout
    assert "python: -m venv .venv" in calls
    assert "export VLLM_METAL_DEVICE=cpu" in done.stdout


def test_without_uv_and_python_the_way_to_get_them_is_named(linux):
    (linux.doubles / "python3").unlink()
    done, _ = linux.install()
    assert done.returncode == 1
    assert "no Python 3.11 to 3.13 here" in done.stderr
    assert "curl -LsSf https://astral.sh/uv/install.sh | sh" in done.stderr
    assert f"curl -LsSf {ADDRESS}/install.sh | sh" in done.stderr
    assert everything_in(linux.home) == set()


def everything_in(home):
    """Returns all files in the home, without empty folders."""
    found = {path.relative_to(home) for path in home.rglob("*")}
    return {str(path) for path in found if (home / path).is_symlink() or (home / path).is_file()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uname": '[ "$1" = -m ] && echo x86_64 || echo Darwin\n'}, "Intel processor"),
        ({"sw_vers": "echo 13.6\n"}, "MLX needs 14 or newer"),
        ({"uname": "echo FreeBSD\n"}, "only macOS on Apple silicon and Linux"),
    ],
)
def test_another_machine_is_told_so_before_anything_large_is_fetched(mac, change, message):
    mac.add("sysctl", "echo 0\n")
    for name, text in change.items():
        mac.add(name, text)
    done, calls = mac.install()
    assert done.returncode == 1
    assert message in done.stderr
    assert not any("astral" in call for call in calls)
    assert everything_in(mac.home) == set()


def test_again_with_nothing_newer_installs_nothing(machine):
    machine.installed()
    done, calls = machine.installed()
    assert "is already installed" in done.stdout
    assert done.stdout.splitlines()[-1].strip().startswith("vllm serve")
    assert not any(" install " in call for call in calls)


def test_again_where_it_is_broken_mends_it(machine):
    machine.installed()
    (machine.root / "versions/1.0-1/.venv/bin/vllm").unlink()
    machine.installed()
    assert machine.serves("vllm") == "7.8.9\n"
    assert machine.versions() == ["1.0-1", "1.0-2"]


def test_an_update_keeps_one_version_back(machine):
    for version in ("1.0", "2.0", "3.0"):
        machine.publish(version)
        machine.installed()
        assert machine.serves() == f"{version}\n"
    assert machine.versions() == ["2.0-1", "3.0-1"]
    # A release may change without a new number while it is developed.
    machine.publish("3.0", text="changed")
    machine.installed()
    assert machine.versions() == ["3.0-1", "3.0-2"]


def test_rolling_back_and_forth(machine):
    machine.installed()
    done, _ = machine.install("--rollback")
    assert done.returncode == 1 and "no version before 1.0-1" in done.stderr
    machine.publish("2.0")
    machine.installed()
    for expected in ("1.0", "2.0", "1.0"):
        done, _ = machine.install("--rollback")
        assert done.returncode == 0, done.stderr
        assert machine.serves() == f"{expected}\n"
    machine.installed()
    assert machine.serves() == "2.0\n"
    assert len(machine.versions()) == 2


def test_rolling_back_to_what_does_not_start_is_refused(machine):
    machine.installed()
    machine.publish("2.0")
    machine.installed()
    (machine.root / "previous/.venv/bin/vllm").unlink()
    done, _ = machine.install("--rollback")
    assert done.returncode == 1 and "1.0-1 does not start" in done.stderr
    assert machine.serves() == "2.0\n"


#: A call, or a link that has just been set, on both systems.
PLACES = {
    "fetching": "curl: -LsSf --retry 3 --connect-timeout 20 --proto =https -o",
    "the environment": "venv",
    "the packages": "--requirement requirements/",
    "the plugin": "-py3-none-any.whl",
    "testing it": "vllm: --version",
    "the way back is set": "replaced previous",
    "the new one is to be set": "/.current.",
    "the new one is set": "replaced current",
}


def places(*by_day, also_set=False):
    """Yields PLACES, without those tested by default."""
    return [
        pytest.param(place, marks=() if place in by_day else pytest.mark.more)
        for place in PLACES
        if also_set or not place.endswith(" set")
    ]


@pytest.mark.parametrize(
    "place",
    places("the packages", "the new one is to be set", "the new one is set", also_set=True),
)
def test_killed_midway_the_old_version_serves_and_the_next_run_ends_well(machine, place):
    machine.installed()
    machine.publish("2.0")
    done, _ = machine.install(KILL_AT=PLACES[place])
    assert done.returncode == -signal.SIGKILL
    assert machine.serves() == ("2.0\n" if place == "the new one is set" else "1.0\n")
    assert machine.serves("vllm") == "7.8.9\n"
    machine.installed()
    assert machine.serves() == "2.0\n"
    assert machine.versions() == ["1.0-1", "2.0-1"]
    assert {path.name for path in machine.root.iterdir()} <= {
        *("current", "previous", "versions", "uv", "cache", "python")
    }
    assert machine.install("--rollback")[0].returncode == 0
    assert machine.serves() == "1.0\n"


@pytest.mark.parametrize("place", places("the plugin"))
def test_killed_at_the_first_install_the_next_run_ends_well(machine, place):
    done, _ = machine.install(KILL_AT=PLACES[place])
    assert done.returncode == -signal.SIGKILL
    machine.installed()
    assert machine.serves() == "1.0\n"
    assert machine.versions() == ["1.0-1"]


@pytest.mark.parametrize("place", places("the packages"))
def test_what_fails_leaves_the_old_version_and_nothing_else(machine, place):
    machine.installed()
    before = everything_in(machine.home)
    machine.publish("2.0")
    done, _ = machine.install(FAIL_AT=PLACES[place])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("install: ")
    assert machine.serves() == "1.0\n"
    assert everything_in(machine.home) == before
    assert [path.name for path in machine.folder.glob("tmp*")] == []


def test_interrupted_it_cleans_up(machine):
    machine.installed()
    before = everything_in(machine.home)
    machine.publish("2.0")
    done, _ = machine.install(KILL_AT="--requirement requirements/", SIGNAL="TERM")
    assert done.returncode == 143
    assert machine.serves() == "1.0\n"
    assert everything_in(machine.home) == before


def test_two_at_once_do_not_meet(machine):
    machine.installed()
    (machine.root / "lock").symlink_to(str(os.getpid()))
    done, _ = machine.install()
    assert done.returncode == 1
    assert f"process {os.getpid()} is already installing" in done.stderr
    assert (machine.root / "lock").is_symlink()


def test_a_file_that_is_not_the_one_listed_is_refused(machine):
    with (machine.release / "vllm_metal-1.0-py3-none-any.whl").open("ab") as file:
        file.write(b"!")
    done, calls = machine.install()
    assert done.returncode == 1
    assert "not the one that SHA256SUMS lists" in done.stderr
    assert not any(" install " in call for call in calls)
    assert everything_in(machine.home) == set()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("http://releases.example", "is not an https address"),
        ("/nowhere", "SHA256SUMS is missing"),
        ("", "export VLLM_METAL_SOURCE="),
        ("https://elsewhere.example", "cannot download https://elsewhere.example/SHA256SUMS"),
    ],
)
def test_a_source_that_is_none_is_named(machine, source, message):
    done, _ = machine.install(VLLM_METAL_SOURCE=source)
    assert done.returncode == 1 and message in done.stderr
    assert everything_in(machine.home) == set()


def test_a_folder_is_a_source(machine):
    machine.installed(VLLM_METAL_SOURCE=str(machine.release))
    assert machine.serves() == "1.0\n"


@pytest.mark.parametrize("shell", ["sh", pytest.param("bash", marks=pytest.mark.more)])
def test_shells_that_it_is_piped_into(machine, shell):
    done, _ = machine.install(shell=shell)
    assert done.returncode == 0, done.stderr


def test_a_script_that_arrives_in_part_does_nothing(mac):
    whole = (mac.release / "install.sh").read_text()
    for share in (0.3, 0.6, 0.99):
        (mac.release / "install.sh").write_text(whole[: int(len(whole) * share)])
        _, calls = mac.install()
        assert calls == []
    assert everything_in(mac.home) == set()


def test_another_program_s_command_stays(machine):
    theirs = machine.home / ".local/bin/vllm"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    done, _ = machine.installed()
    assert theirs.read_text() == "theirs"
    assert "~/.local/bin/vllm is another program; keeping it" in done.stdout
    assert machine.serves() == "1.0\n"
    assert machine.install("--uninstall")[0].returncode == 0
    assert everything_in(machine.home) == {".local/bin/vllm"}


def test_another_command_before_ours_on_the_path_is_named(machine):
    machine.add("vllm", "echo theirs\n")
    path = f"{machine.doubles}:{machine.home}/.local/bin"
    done, _ = machine.installed(PATH=path)
    assert f"has another vllm before ours: {machine.doubles}/vllm" in done.stdout


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("/bin/zsh", """echo 'export PATH="$HOME/.local/bin:$PATH"' >>~/.zprofile"""),
        ("/bin/bash", """echo 'export PATH="$HOME/.local/bin:$PATH"' >>~/.profile"""),
        ("/usr/bin/fish", "fish_add_path ~/.local/bin"),
    ],
)
def test_a_path_without_our_folder_gets_its_line(mac, shell, line):
    done, _ = mac.installed(SHELL=shell)
    assert line in [text.strip() for text in done.stdout.splitlines()]
    with_it = f"{mac.doubles}:{mac.home}/.local/bin"
    assert "your PATH lacks" not in mac.installed(PATH=with_it)[0].stdout


def test_a_machine_too_small_for_any_known_model_is_still_installed(machine):
    done, _ = machine.installed(TOO_SMALL="yes")
    assert "no model fits" in done.stderr
    assert "vllm serve MODEL" in done.stdout.splitlines()[-1]


def test_uninstalling_leaves_what_it_names_and_nothing_else(machine):
    machine.installed()
    machine.publish("2.0")
    machine.installed()
    left = (".cache/huggingface/model", ".cache/vllm-metal/kept", ".config/vllm/usage", "mine")
    for name in left:
        (machine.home / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.home / name).write_text("")
    script = machine.root / "current/scripts/install.sh"
    env = {"PATH": str(machine.doubles), "HOME": str(machine.home), "CALLS": os.devnull}
    done = subprocess.run(
        ["sh", script, "--uninstall"], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert everything_in(machine.home) == set(left)
    named = {line.split()[2] for line in done.stdout.splitlines() if ": left: " in line}
    assert named == {"~/.cache/huggingface", "~/.cache/vllm-metal", "~/.config/vllm"}
    removed = [line for line in done.stdout.splitlines() if "removing" in line]
    assert len(removed) == 3 and any("~/.local/share/vllm-metal" in line for line in removed)
    assert not (machine.home / ".local").exists()


def test_uninstalling_twice_says_that_nothing_is_there(machine):
    done, _ = machine.install("--uninstall")
    assert done.returncode == 0 and "does not exist" in done.stdout


def test_an_unknown_option_is_refused(machine):
    done, calls = machine.install("--help-me")
    assert done.returncode == 1 and "unknown option --help-me" in done.stderr
    assert calls == []


#: Variables that select this machine's package index and torch's CPU build.
_OF_THE_INDEX = ("PIP_", "SSL_", "TORCH_INDEX", "HTTPS_PROXY", "https_proxy")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="on a Mac it would be a Mac's, without doubles")
def test_a_real_install_and_update_in_an_empty_home(tmp_path):
    """Fetches half a gigabyte from the package index."""
    clone, home = copy_clone(tmp_path / "clone"), tmp_path / "a home"
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if k.startswith(_OF_THE_INDEX)}
    env = kept | {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    root, commands = home / ".local/share/vllm-metal", home / ".local/bin"
    log = (tmp_path / "log").open("w+")

    def start(release, *options):
        line = ["sh", release / "install.sh", *options]
        return subprocess.Popen(line, env=env, stdout=log, stderr=log, start_new_session=True)

    def install(release, *options):
        assert start(release, *options).wait(900) == 0, (tmp_path / "log").read_text()

    def out(*line):
        on_cpu = env | {"VLLM_METAL_DEVICE": "cpu"}
        return subprocess.check_output(line, env=on_cpu, cwd=tmp_path, text=True, timeout=3000)

    versions = []
    for version in ("0.9.1", "0.9.2"):
        about = (clone / "pyproject.toml").read_text()
        lines = [
            f'version = "{version}"' if x.startswith("version") else x for x in about.split("\n")
        ]
        (clone / "pyproject.toml").write_text("\n".join(lines))
        versions.append(shutil.copytree(make(clone), tmp_path / version))
    install(versions[0])
    assert out(commands / "vllm-metal", "--version") == "0.9.1\n"
    assert out(commands / "vllm", "--version").startswith(f"{TESTED_VLLM}.")
    shown = out(root / "current/.venv/bin/python", root / "current/examples/demo.py")
    assert "All answers are right" in shown

    killed = start(versions[1])
    while not list(root.glob("versions/0.9.2-1/.venv/lib/*/site-packages/torch")):
        assert killed.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.2)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert out(commands / "vllm-metal", "--version") == "0.9.1\n"

    install(versions[1])
    assert out(commands / "vllm-metal", "--version") == "0.9.2\n"
    install(versions[1], "--rollback")
    assert out(commands / "vllm-metal", "--version") == "0.9.1\n"
    install(versions[1], "--uninstall")
    named = re.findall(r"left: ~/(\S+)", (tmp_path / "log").read_text())
    left = everything_in(home)
    assert left and all(any(path.startswith(f"{name}/") for name in named) for path in left), left


def test_shellcheck_is_clean():
    scripts = sorted((ROOT / "scripts").glob("*.sh"))
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (Debian: apt install shellcheck)")
    found = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
