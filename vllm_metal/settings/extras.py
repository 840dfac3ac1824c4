# SPDX-License-Identifier: Apache-2.0
"""Makes the commands that messages advise to install optional parts of the plugin.

Advice names packages of other projects, or a folder of the clone. It never names
``vllm-metal[...]`` or ``vllm-metal-interpreter``: an installer would ask a package index for them,
and take what somebody else has released there under that name.
"""

import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

#: Packages of the extras that messages advise, as pyproject.toml declares them.
PACKAGES = {
    "gguf": ("gguf>=0.19", "filelock>=3.20.3"),
    "redis": ("redis>=6",),
    "chat": (
        "httpx>=0.28",
        "markdown-it-py>=4",
        "pygments>=2.19",
        "starlette>=0.49",
        "uvicorn>=0.38",
    ),
    "vlm": ("mlx-vlm>=0.7.10,<0.8",),
}
#: Extras whose packages declare far more than the modules used here import: installed alone.
ALONE = ("vlm",)
#: Extras that are folders of the clone, and no part of the wheel.
FOLDERS = {"interpreter": "interpreter"}
#: What the extra `interpreter` brings: the compiler that runs kernels on a CPU.
INTERPRETER = "metal_interpreter:metal_kernel"

CLONE = Path(__file__).parents[2]  # or site-packages, which holds no such folder


def install_advice(extra: str) -> str:
    """The command that installs what an extra stands for beside this interpreter.

    Raises:
        KeyError: it is in neither `PACKAGES` nor `FOLDERS`.
    """
    if extra not in FOLDERS:
        return pip_install(*(["--no-deps"] if extra in ALONE else []), *PACKAGES[extra])
    folder = CLONE / FOLDERS[extra]
    if (folder / "pyproject.toml").is_file():
        return pip_install(str(folder))
    return f"{pip_install(f'./{FOLDERS[extra]}')}  (in a clone of the repository)"


def pip_install(*arguments: str) -> str:
    """The command that installs into this interpreter's environment, with pip or, without, uv."""
    # Of the path alone: setuptools' own finder takes a look for pip as a wish for Python's
    # distutils, and the next import of setuptools in the process, as torch's, would fail.
    if PathFinder.find_spec("pip") is None:
        command = ["uv", "pip", "install", "--python", sys.executable]
    else:
        command = [sys.executable, "-m", "pip", "install"]
    return shlex.join([*command, *arguments])
