# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels and the runtime they are linked with, and caches the results on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from metal_kernels.cache import cache_dir

_HERE = Path(__file__).parent
_RUN_SOURCES = ("fiber.cpp", "arena.cpp", "scheduler.cpp")
_CHECK_SOURCES = (*_RUN_SOURCES, "check.cpp", "regions.cpp", "shadow.cpp", "traffic.cpp")

# No C++ library: kernels have none on a GPU, and ziglang takes a minute to build its own.
_COMMON = ("-x", "c++", "-nostdinc++", "-fPIC", "-fno-exceptions", "-fno-rtti", "-g1")
_RUNTIME = (*_COMMON, "-std=c++17", "-O2", "-fno-threadsafe-statics", "-Wall")
# As strict as Metal: C++17 and no later, one rounding for every operation, no contraction.
_KERNEL = (
    *_COMMON,
    "-std=c++17",
    "-Werror=c++20-extensions",
    "-nostdinc",
    # macOS makes one of all inline functions of a name in a process, and those of two kernels may
    # differ: nothing leaves a library but its entry.
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fwrapv",  # an offset that overflows does so here, too, and is then out of bounds
    # MLX's CPU allocator aligns to 8 bytes, a GPU's to a page: 16-byte loads must not rely on more.
    "-fmax-type-align=8",
    "-Xclang",
    "-ffloat16-excess-precision=none",
    "-fno-sanitize=undefined",
    # Calls in two branches stay two calls, also of functions with a barrier or simdgroup function
    # inside: which threads meet there is a property of the source.
    *("-mllvm", "-sink-common-insts=false", "-mllvm", "-hoist-common-insts=false"),
    *("-mllvm", "-enable-tail-merge=false"),
    "-Wno-unknown-attributes",
    "-Wno-ignored-attributes",
    "-Wno-user-defined-literals",
    f"-I{_HERE / 'shim'}",
)


_building = threading.Lock()  # temporary names are one process's, not one thread's


class CompileError(RuntimeError):
    """A kernel does not compile; the message is the compiler's."""


@dataclass(frozen=True)
class Mode:
    """Compiler flags of kernels, and the sources and flags of the runtime they are linked with."""

    name: str
    kernel_flags: tuple[str, ...]
    runtime_flags: tuple[str, ...]
    runtime_sources: tuple[str, ...]


RUN = Mode("run", ("-O2",), (), _RUN_SOURCES)
# ThreadSanitizer's calls at every access, answered by our own runtime. They exist for 1, 2, 4, 8
# and 16 bytes only and wider accesses would go unseen, hence no vectorization.
CHECK = Mode(
    "check",
    (
        "-O2",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        "-mllvm",  # would split a vector's load into those of the components used
        "-disable-vector-combine",
        "-fsanitize=thread",
        "-mllvm",
        "-tsan-instrument-func-entry-exit=0",
        "-mllvm",
        "-tsan-instrument-read-before-write=1",
        "-DMETAL_CPU_CHECK=1",
    ),
    ("-DMETAL_CPU_CHECK=1",),
    _CHECK_SOURCES,
)


def cache_folder() -> Path:
    """Returns the folder of compiled kernels, runtimes and the compiler's cache; creates it."""
    folder = cache_dir() / "interpreter"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiler() -> tuple[str, ...]:
    """Returns the command of a clang that supports ext_vector_type and _Float16.

    It is `$VLLM_METAL_CLANG` if set, else the clang in the package `ziglang`.

    Raises:
        RuntimeError: the variable is not set, and the package is not installed.
    """
    named = os.environ.get("VLLM_METAL_CLANG")
    if named:
        return tuple(named.split())
    if importlib.util.find_spec("ziglang") is None:
        raise RuntimeError(
            "Running Metal kernels on a CPU needs a clang: install the package ziglang "
            f"({sys.executable} -m pip install ziglang), or name a clang++ in VLLM_METAL_CLANG."
        )
    # Without a target zig links by the SDK's description of libSystem, which since macOS 26 names
    # arm64e and not arm64 (codeberg.org/ziglang/zig/issues/31756). With one it uses its own.
    target = ("-target", "aarch64-macos") if sys.platform == "darwin" else ()
    return (sys.executable, "-m", "ziglang", "cc", *target)


def build_kernel(text: str, mode: Mode, extra_flags: Sequence[str] = ()) -> Path:
    """Returns the shared library of a kernel's translation unit; compiles it if not cached.

    Raises:
        CompileError: the text does not compile.
    """
    runtime = build_runtime(mode)
    flags = (*_KERNEL, *mode.kernel_flags, *extra_flags)
    key = _hash(text, str(runtime), *flags, *_fingerprint(compiler()))
    target = cache_folder() / f"kernel-{key}{_suffix()}"
    with _building:
        _build_missing(text, flags, runtime, target)
    return target


def _build_missing(text: str, flags: Sequence[str], runtime: Path, target: Path) -> None:
    if not target.exists():
        unit = target.with_name(f"{target.stem}-{os.getpid()}.cpp")
        unit.write_text(text)
        made = unit.with_suffix(".o")
        try:
            _invoke([*flags, "-c", str(unit), "-o", str(made)])
            _link([str(made), str(runtime)], target)
        finally:
            unit.unlink(missing_ok=True)
            made.unlink(missing_ok=True)


def llvm_text(text: str, extra_flags: Sequence[str] = ()) -> str:
    """Compiles a translation unit to unoptimized LLVM assembly.

    Raises:
        CompileError: the text does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        unit, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.ll"
        unit.write_text(text)
        flags = (*_KERNEL, "-O0", *extra_flags, "-S", "-emit-llvm")
        _invoke([*flags, str(unit), "-o", str(made)])
        return made.read_text()


def assembly(text: str, flags: Sequence[str]) -> str:
    """Compiles a translation unit to assembly for the processor that `flags` selects.

    Always uses the clang of `ziglang`, so that a text gives the same assembly on every machine.

    Raises:
        CompileError: the text does not compile.
        RuntimeError: the package is not installed.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise RuntimeError(
            f"this needs the package ziglang: {sys.executable} -m pip install ziglang"
        )
    with tempfile.TemporaryDirectory() as folder:
        unit, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.s"
        unit.write_text(text)
        clang = (sys.executable, "-m", "ziglang", "clang")
        _invoke([*flags, "-S", str(unit), "-o", str(made)], command=clang)
        return made.read_text()


def build_runtime(mode: Mode) -> Path:
    """Returns the shared library that a mode's kernels are linked with; builds it if needed."""
    return _runtime(mode, cache_folder(), compiler())


@cache
def _runtime(mode: Mode, folder: Path, command: tuple[str, ...]) -> Path:
    flags = (*_RUNTIME, *mode.runtime_flags)
    target = folder / f"runtime-{mode.name}-{_hash(*flags, *_fingerprint(command))}{_suffix()}"
    if not target.exists():
        objects = []
        for name in mode.runtime_sources:
            made = target.with_name(f"{target.stem}-{Path(name).stem}-{os.getpid()}.o")
            _invoke([*flags, "-c", str(_HERE / "runtime" / name), "-o", str(made)])
            objects.append(made)
        try:
            _link([str(o) for o in objects], target)
        finally:
            for made in objects:
                made.unlink(missing_ok=True)
    return target


def _link(inputs: Sequence[str], target: Path) -> None:
    # Under another name first: a process that looks for the target must never see half of it.
    made = target.with_name(f"{target.name}-{os.getpid()}")
    # The process has a C library; ziglang would build stubs of one, or a runtime, in 20 seconds.
    flags = ["-nostdlib"]
    if sys.platform == "darwin":
        flags += ["-lSystem", f"-Wl,-install_name,{target}"]
    _invoke(["-shared", "-g1", *inputs, *flags, "-o", str(made)])
    made.replace(target)


def _invoke(
    arguments: Sequence[str], folder: str | None = None, command: Sequence[str] = ()
) -> str:
    """Runs the compiler, or `command`, in `folder` if given; returns its standard output."""
    environment = dict(os.environ)
    environment.setdefault("ZIG_GLOBAL_CACHE_DIR", str(cache_folder() / "zig"))
    command = command or compiler()
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise RuntimeError(
            f"The compiler {command[0]!r} cannot be run ({error}): VLLM_METAL_CLANG must name a "
            "clang++, or be unset to use the one of the package ziglang."
        ) from error
    if done.returncode:
        raise CompileError(done.stderr.strip() or f"the compiler ended with {done.returncode}")
    return done.stdout


@cache
def _fingerprint(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns texts that a compiled library depends on besides its own, for the cache key."""
    folders = (_HERE / "shim", _HERE / "runtime")
    texts = [p.read_text() for f in folders for p in sorted(f.rglob("*")) if p.is_file()]
    with tempfile.TemporaryDirectory() as folder:  # ziglang leaves an empty a.o for a Mac
        version = _invoke(["--version"], folder)
    return (*texts, *command, version, platform.machine(), _processor())


def _processor() -> str:
    """Returns the CPU's features: code is compiled for them, but machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _hash(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _suffix() -> str:
    return ".dylib" if sys.platform == "darwin" else ".so"
