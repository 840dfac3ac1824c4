# SPDX-License-Identifier: Apache-2.0
"""Kernels without the interpreter, which users' installs do not have."""

import subprocess
import sys

import metal_interpreter

from metal_kernels import kernel
from vllm_metal.settings.extras import INTERPRETER

# An import of MODULE raises ModuleNotFoundError from now on, as if it were not installed.
WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == MODULE:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

sys.meta_path.insert(0, Missing())
"""
IMPORT_ALL = """
import importlib, pkgutil, metal_kernels
for module in pkgutil.walk_packages(metal_kernels.__path__, "metal_kernels."):
    importlib.import_module(module.name)
"""
ASK = """
from metal_kernels import kernel
kernel.named("metal_interpreter:metal_kernel")
"""


def last_error(module, code):
    """What a process without `module` says of an exception; nothing: it raised none."""
    program = WITHOUT.replace("MODULE", repr(module)) + code
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, timeout=300
    )
    return (done.stderr.splitlines() or [""])[-1]


def test_the_interpreter_compiles_as_mlx_does():
    assert kernel.named(INTERPRETER) is metal_interpreter.metal_kernel


def test_without_the_interpreter_its_package_is_named():
    said = last_error("metal_interpreter", ASK)
    assert said == "RuntimeError: the package metal_interpreter is not installed"


def test_what_the_interpreter_itself_lacks_is_not_hidden():
    said = last_error("metal_interpreter.launch", ASK)
    assert said == "ModuleNotFoundError: No module named 'metal_interpreter.launch'"


def test_no_module_needs_the_interpreter_to_be_imported():
    assert last_error("metal_interpreter", IMPORT_ALL) == ""
    assert "metal_interpreter" in last_error("metal_interpreter", "import metal_interpreter")
