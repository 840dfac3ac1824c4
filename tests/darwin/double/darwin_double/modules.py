# SPDX-License-Identifier: Apache-2.0
"""Runs hooks before and after the import of a module."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

from darwin_double import system

#: Packages that choose a library by platform during import, or link a Linux one.
LINUX_WHEELS = ("torch", "llvmlite", "numba", "tvm_ffi", "xgrammar", "truststore")

#: Modules of ours that pass it to a compiler, and load the libraries into this process.
LINUX_MODULES = ("metal_interpreter.toolchain", "metal_interpreter.launch")

_before: dict[str, Callable[[], None]] = {}
_after: dict[str, Callable[[ModuleType], None]] = {}


def before_import(name: str, act: Callable[[], None]) -> None:
    """Calls `act` before module `name` is imported."""
    _before[name] = act


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Calls `change` with module `name` after its import; immediately if it is already imported."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        _after[name] = change


def install() -> None:
    """Activates the registered hooks."""
    for name in LINUX_MODULES:
        after_import(name, _tell_linux)
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


class _LinuxSys:
    """`sys` with Linux's platform."""

    platform = "linux"

    def __getattr__(self, name: str) -> object:
        return getattr(sys, name)


def _tell_linux(module: ModuleType) -> None:
    module.sys = _LinuxSys()  # type: ignore[attr-defined]


class _Finder:
    """Wraps the execution of modules that the usual finders find."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        linux = name.partition(".")[0] in LINUX_WHEELS
        if not linux and name not in _before and name not in _after:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        create, execute = spec.loader.create_module, spec.loader.exec_module

        def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
            _before.pop(name, lambda: None)()  # a compiled module is loaded here
            return create(spec)

        def exec_module(module: ModuleType) -> None:
            around: AbstractContextManager[None] = system.as_linux() if linux else nullcontext()
            with around:
                execute(module)
            _after.pop(name, lambda module: None)(module)

        spec.loader.create_module = create_module  # type: ignore[method-assign]
        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
