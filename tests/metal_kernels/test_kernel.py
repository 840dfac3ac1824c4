# SPDX-License-Identifier: Apache-2.0
"""Kernels without the interpreter, which users' installs lack."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import metal_interpreter
import pytest

import metal_kernels
from metal_kernels import kernel
from metal_kernels.kernel_text import Part, compact, used
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
    """Returns the exception of a process without `module`; empty if none."""
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


OF_A_FILE = """\
// SPDX
// A page.

#define TWICE(x) ((x) + (x))

// Of nobody.
inline float unused(float x) {
  return TWICE(x);
}

template <typename T>
inline T by_name(T x) {

  return x * LIMIT;  // 2 lines
}

template <>
inline int by_name<int>(int x) { return x; }

constant constexpr float LIMIT = 2.0f;
constant int OTHER = 3;
"""
BODY = "// of `unused`\n  out[0] = by_name(in0[0]);\n" + 12 * "// on\n" + "  out[1] = 0;\n"


def test_a_kernel_has_what_it_uses_and_each_line_its_number():
    body = Part(BODY, "body.metal", 40)
    shared = Part(OF_A_FILE, "shared.metal", 1)
    assert used([shared], body) == (
        '#line 11 "shared.metal"\ntemplate <typename T>\ninline T by_name(T x) {\n\n'
        "return x * LIMIT;\n}\n\ntemplate <>\ninline int by_name<int>(int x) { return x; }\n\n"
        "constant constexpr float LIMIT = 2.0f;\nconstant int OTHER = 3;\n"
    )
    assert compact([body]) == (
        '#line 41 "body.metal"\nout[0] = by_name(in0[0]);\n#line 54\nout[1] = 0;\n'
    )


def test_what_is_between_is_counted_and_another_file_named():
    body = Part("by_name(0); TWICE(1);", "body.metal", 1)
    text = used([Part(OF_A_FILE, "shared.metal", 1), Part("using A = B;", "own.metal", 1)], body)
    assert text.startswith(
        '#line 4 "shared.metal"\n#define TWICE(x) ((x) + (x))\n\n\n\n\n\n\ntemplate'
    )
    assert text.endswith('OTHER = 3;\n#line 1 "own.metal"\nusing A = B;\n')  # names nothing


METAL = sorted(Path(kernel.__file__).parent.rglob("*.metal"))


@pytest.mark.parametrize("path", METAL, ids=lambda path: path.name)
def test_comments_of_our_kernels_end_with_their_line(path):
    assert "/*" not in path.read_text()


def test_every_shared_function_is_used():
    """No kernel's check would compile an unused one."""
    headers = "\n".join(each.header for each in all_kernels())
    for path in METAL:
        if path.parent.name == "shared":
            lines = compact([Part(path.read_text(), path.name, 1)]).splitlines()
            missing = {line for line in lines if line[:1] != "#"} - set(headers.splitlines())
            assert not missing, path.name


def all_kernels():
    """Loads all kernels like their modules."""
    for found in pkgutil.walk_packages(metal_kernels.__path__, "metal_kernels."):
        if found.name.endswith(".op"):
            values = vars(importlib.import_module(found.name)).values()
            yield from (value for value in values if isinstance(value, kernel.Kernel))


def test_the_text_of_a_layer_s_kernels_is_short():
    """MLX hashes it per dispatch; with comments and all shared functions, it was 44,900."""
    sizes = {each.name: len(each.header) + len(each.body) for each in all_kernels()}
    assert sum(sizes[name] for name in ("kv_write", "decode", "reduce")) < 26_000
