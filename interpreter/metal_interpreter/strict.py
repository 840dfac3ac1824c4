# SPDX-License-Identifier: Apache-2.0
"""Strict mode: checks that a kernel does not mix pointers of different address spaces.

In other modes memory is flat, and `device`, `constant` and `threadgroup` have no effect. In this
mode they are clang's address spaces. The function that MLX generates is compiled for the template
arguments of a call, but does not run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from . import toolchain, translate
from .signature import Signature
from .unrun import Call, UnrunKernel, unrun

_FLAGS = (
    "-DMETAL_CPU_ADDRESS_SPACES",
    "-Wno-duplicate-decl-specifier",  # the macro `constant` is const as well
    "-Werror=vla",
    "-Wno-unused-command-line-argument",  # ziglang adds what -S makes useless
)
_SPACES = ("thread", "device", "constant", "threadgroup")  # as the shim numbers them

_ARENA_TYPE = re.compile(r"threadgroup (metal_cpu_type_\d+)&")

_CONVERSION = re.compile(
    r"addrspacecast \(?ptr(?: addrspace\((\d)\))? [^,]*? to ptr(?: addrspace\((\d)\))?"
    r".*!dbg !(\d+)"
)
_LOCATION = re.compile(r"^!(\d+) = .*!DILocation\(line: (\d+), column: (\d+), scope: !(\d+)", re.M)
_SCOPE = re.compile(
    r"^!(\d+) = (?:distinct )?!(?:DISubprogram|DILexicalBlock\w*)\(.*?file: !(\d+)", re.M
)
_FILE = re.compile(r'^!(\d+) = !DIFile\(filename: "([^"]*)"', re.M)


@dataclass(frozen=True, eq=False)
class Strict:
    """Makes kernels like `mx.fast.metal_kernel` that are compiled, but not run: outputs are zeros.

    Rejects, with file and line: assigning a pointer of an address space to one without qualifier,
    casts between two spaces, writes through `constant`, threadgroup variables outside of the
    kernel's body or of a type with a constructor, and arrays of variable length. Also rejects
    copies of whole structs from device memory, which Metal allows.
    """

    # Names of the compiled functions, which tell types and template arguments.
    functions: list[str] = field(default_factory=list)
    _compiled: set[tuple[Signature, str, str]] = field(default_factory=set)

    @property
    def metal_kernel(self) -> Callable[..., UnrunKernel]:
        """Replacement for `mx.fast.metal_kernel`, with the same arguments and errors.

        Calling a kernel raises CompileError if its address spaces do not match.
        """
        return unrun(self._compile)

    def _compile(self, call: Call) -> None:
        compiled = call.signature, call.header, call.source
        if compiled not in self._compiled:
            _compile(_unit(*compiled))
            self._compiled.add(compiled)
            self.functions.append(call.signature.function)


def _unit(signature: Signature, header: str, source: str) -> str:
    text = translate.with_made_vectors(translate.function(signature, header, source))
    text = _ARENA_TYPE.sub(
        r'static_assert(__is_trivial(\1), "threadgroup variables have no constructor"); \g<0>',
        text,
    )
    if signature.template:
        called = signature.function + signature.arguments
        text += f"template decltype({called}) {called};\n"
    return text


def _compile(text: str) -> None:
    made = toolchain.llvm_text(text, _FLAGS)
    # C++ lets a C-style cast change the address space: only the generated code shows it.
    conversions = sorted(set(_CONVERSION.findall(made)))
    if not conversions:
        return
    place = {number: at for number, *at in _LOCATION.findall(made)}
    file_of = dict(_SCOPE.findall(made))
    name_of = dict(_FILE.findall(made))
    messages = []
    for source, target, location in conversions:
        line, column, scope = place[location]
        messages.append(
            f"{name_of[file_of[scope]]}:{line}:{column}: error: a {_SPACES[int(source or 0)]} "
            f"pointer becomes a {_SPACES[int(target or 0)]} one"
        )
    raise toolchain.CompileError("\n".join(messages))
