# SPDX-License-Identifier: Apache-2.0
"""The macOS test double behaves like a Mac, and detects what other tests rely on."""

import signal
import subprocess
from textwrap import dedent

import pytest
from darwin.run import CRASH, run

GIB = 1 << 30
PAGE = 16384


def tell(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(["-c", dedent(code)], **variables)


def test_the_system_is_named_darwin_and_processes_spawn() -> None:
    code = """
        import multiprocessing, os, platform, sys
        print(sys.platform, platform.system(), platform.machine(), os.uname().sysname)
        print(platform.mac_ver()[0], multiprocessing.get_start_method())
    """
    told = tell(code, DARWIN_DOUBLE_RELEASE="26.1")
    assert told.stdout == "darwin Darwin arm64 Darwin\n26.1 spawn\n", told.stderr


def test_children_are_macs_too() -> None:
    code = """
        import subprocess, sys
        subprocess.run([sys.executable, "-c", "import sys; print(sys.platform)"], check=True)
    """
    told = tell(code)
    assert told.stdout == "darwin\n", told.stderr


@pytest.mark.parametrize(
    "call",
    [
        "mps.empty_cache",
        pytest.param("accelerator.empty_cache", marks=pytest.mark.more),
        pytest.param("accelerator.empty_host_cache", marks=pytest.mark.slow),
    ],
)
def test_emptying_torch_s_caches_ends_the_process(call: str) -> None:
    code = f"""
        import torch
        torch.manual_seed(0)
        accelerator = torch.accelerator
        print(accelerator.is_available(), accelerator.device_count(), torch.backends.mps.is_built())
        print(accelerator.current_accelerator(), flush=True)
        torch.{call}()
        print("survived")
    """
    told = tell(code)
    assert told.stdout == "True 1 True\nmps\n"
    assert told.returncode == -signal.SIGABRT and told.stderr.startswith(CRASH)


@pytest.mark.parametrize(
    ("module", "dies"),
    [
        ("json", False),
        ("mlx.core", True),
        pytest.param("torch", True, marks=pytest.mark.more),
    ],
)
def test_a_child_forked_after_torch_or_mlx_is_lost(module: str, dies: bool) -> None:
    code = f"""
        import os, {module}
        if (child := os.fork()) == 0:
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    told = tell(code)
    assert told.stdout == (f"{-signal.SIGABRT}\n" if dies else "0\n"), told.stderr
    assert told.stderr.startswith(CRASH) == dies


def test_linux_s_files_are_not_there() -> None:
    code = """
        import os, psutil
        from pathlib import Path
        print(os.path.exists("/proc"), Path("/dev/shm").exists(), os.access("/sys", os.R_OK))
        for act in (open, os.listdir, os.scandir, os.stat, lambda name: Path(name).read_text()):
            try:
                act("/proc/self/status")
            except FileNotFoundError as error:
                print(error.filename)
        print(psutil.Process().memory_info().rss > 0, os.path.exists("/dev/null"))
    """
    told = tell(code)
    expected = ["False False False", *["/proc/self/status"] * 5, "True True"]
    assert told.stdout.splitlines() == expected, told.stderr


def test_object_files_are_not_elf() -> None:
    code = """
        import sys
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
        try:
            ELFFile(open(sys.executable, "rb"))
        except ELFError as error:
            print(error)
    """
    told = tell(code)
    assert told.stdout == "Magic number does not match\n", told.stderr


def test_memory_is_reckoned_and_read_as_on_a_mac() -> None:
    code = """
        import ctypes, psutil
        vm = psutil.virtual_memory()
        print(*vm._fields)
        print(vm.total, vm.available == vm.free + vm.inactive, vm.used == vm.active + vm.wired)

        def read(name, kind):
            value, size = kind(), ctypes.c_size_t(ctypes.sizeof(kind))
            arguments = name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
            failed = ctypes.CDLL(None).sysctlbyname(*arguments)
            return failed or (value.value, size.value)

        print(read(b"hw.memsize", ctypes.c_uint64), read(b"hw.memsize", ctypes.c_uint32))
        print(read(b"vm.page_pageable_external_count", ctypes.c_uint))
        print(read(b"kern.memorystatus_vm_pressure_level", ctypes.c_int))
        print(read(b"kern.memorystatus_level", ctypes.c_int), read(b"no.such", ctypes.c_int))
    """
    told = tell(
        code,
        DARWIN_DOUBLE_TOTAL=str(16 * GIB),
        DARWIN_DOUBLE_AVAILABLE=str(4 * GIB),
        DARWIN_DOUBLE_FILES=str(3 * GIB),
        DARWIN_DOUBLE_PRESSURE="4",
    )
    assert told.stdout.splitlines() == [
        "total available percent used free active inactive wired",
        f"{16 * GIB} True True",
        f"({16 * GIB}, 8) -1",
        f"({3 * GIB // PAGE}, 4)",
        "(4, 4)",
        "(81, 4) -1",  # a quarter of the 12 GiB in use is wired: 13 of 16 GiB are not
    ], told.stderr


def test_names_of_unix_sockets_are_short() -> None:
    code = """
        import os, socket, tempfile, zmq
        folder = os.path.join(tempfile.mkdtemp(), "")
        plain, queue = socket.socket(socket.AF_UNIX), zmq.Context().socket(zmq.PAIR)
        for length in (104, 103):
            for bind, prefix, letter in ((plain.bind, "", "x"), (queue.bind, "ipc://", "y")):
                try:
                    bind(prefix + folder.ljust(length, letter))
                    print("bound")
                except (OSError, zmq.ZMQError) as error:
                    print(error)
    """
    told = tell(code)
    refused = ["AF_UNIX path too long", "File name too long"]
    assert told.stdout.splitlines() == [*refused, "bound", "bound"], told.stderr
