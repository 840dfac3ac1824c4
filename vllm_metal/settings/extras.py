# SPDX-License-Identifier: Apache-2.0
"""Makes the commands that messages recommend for installing optional parts of the plugin."""

import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path

#: Packages of the extras that messages recommend, as pyproject.toml declares them. Commands name
#: these, or a folder of the clone, never ``vllm-metal[...]`` or ``vllm-metal-interpreter``: an
#: installer would look those up in a package index and take whatever somebody else released there.
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
#: Extras installed with --no-deps: their packages declare far more than the modules used here
#: import.
NO_DEPS = ("vlm",)
#: Extras that are folders of the clone and not part of the wheel.
FOLDERS = {"interpreter": "interpreter"}
#: The compiler that runs kernels on a CPU, from the extra `interpreter`.
INTERPRETER = "metal_interpreter:metal_kernel"

CLONE = Path(__file__).parents[2]  # or site-packages, which holds no such folder


def install_advice(extra: str) -> str:
    """Returns the command that installs an extra, a key of `PACKAGES` or `FOLDERS`."""
    if extra not in FOLDERS:
        return pip_install(*(["--no-deps"] if extra in NO_DEPS else []), *PACKAGES[extra])
    folder = CLONE / FOLDERS[extra]
    if (folder / "pyproject.toml").is_file():
        return pip_install(str(folder))
    return f"{pip_install(f'./{FOLDERS[extra]}')}  (in a clone of the repository)"


def pip_install(*arguments: str) -> str:
    """Returns an install command for this environment, with pip or, if it is missing, uv."""
    # PathFinder alone: setuptools' finder reacts to a lookup of pip by restoring Python's
    # distutils, and the next import of setuptools in this process (by torch, say) would fail.
    if PathFinder.find_spec("pip") is None:
        command = ["uv", "pip", "install", "--python", sys.executable]
    else:
        command = [sys.executable, "-m", "pip", "install"]
    return shlex.join([*command, *arguments])
