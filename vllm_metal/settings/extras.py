# SPDX-License-Identifier: Apache-2.0
"""The commands that install what optional parts of the plugin need.

Advice names packages, never ``vllm-metal[...]``: a package index has another project's release
under that name, and an installer might take it in place of this one.
"""

import shlex
import sys
from importlib.util import find_spec

#: Packages of the extras that messages advise, as pyproject.toml declares them.
PACKAGES = {
    "gguf": ("gguf>=0.19", "filelock>=3.20.3"),
    "interpreter": ("ziglang>=0.15",),
}


def install_advice(extra: str) -> str:
    """The command that installs an extra's packages beside this interpreter.

    Raises:
        KeyError: it is no extra of `PACKAGES`.
    """
    return pip_install(*PACKAGES[extra])


def pip_install(*arguments: str) -> str:
    """The command that installs into this interpreter's environment, with pip or, without, uv."""
    if find_spec("pip") is None:
        command = ["uv", "pip", "install", "--python", sys.executable]
    else:
        command = [sys.executable, "-m", "pip", "install"]
    return shlex.join([*command, *arguments])
