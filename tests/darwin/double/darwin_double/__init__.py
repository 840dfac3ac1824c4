# SPDX-License-Identifier: Apache-2.0
"""A Linux process that takes itself for a Mac: a double to try macOS's paths on.

`install()` runs before anything else in a process and in all its children (`sitecustomize.py`), as
long as they are Python and inherit PYTHONPATH. It imitates, of macOS 15 on Apple silicon:

- `sys.platform`, `os.uname`, `platform.system`, `machine`, `release`, `mac_ver`; functions of `os`
  that only Linux has are missing
- multiprocessing's start method, `spawn`; a process that forks with torch or MLX loaded loses the
  child, as it would to Apple's frameworks, which do not survive a fork
- torch with an MPS accelerator, whose caches' emptying ends the process: torch 2.13's wheel for
  macOS follows a null pointer to a host allocator there
- no /proc, /sys and /dev/shm for Python code; no ELF for pyelftools
- the fields of psutil's `virtual_memory`, and `sysctlbyname` (`memory.py` has the figures and the
  variables that set them)
- names of Unix sockets of no more than 103 bytes, Python's and ZeroMQ's; `socket.TCP_KEEPALIVE`

It does not imitate:

- Metal and MLX's GPU device: use VLLM_METAL_DEVICE=cpu, which the tests set
- what compiled code sees: libraries are Linux's, in speed, threads and file formats; so wheels that
  choose a library by `sys.platform`, and our compiler of kernels for the CPU, see Linux
  (`modules.LINUX_WHEELS`, `LINUX_MODULES`)
- torch tensors on `mps`
- psutil but for `virtual_memory`: processes and their memory are read as on Linux
- programs other than Python and `caffeinate`: `uname`, `sysctl`, `vm_stat`, `sw_vers`
- `select.kqueue` in place of `epoll`, uvloop's own sockets, limits on the names of semaphores and
  shared memory, semaphores without a value, file names without case, code signing, sandboxes, the
  clock of a sleeping Mac

A process it ends first prints a line that begins with `CRASH`.
"""

from __future__ import annotations

import os
import resource

#: Begins the line a process prints to stderr before it ends as on a Mac.
CRASH = "darwin double: macOS would end this process:"


def crash(why: str) -> None:
    """Ends the process by SIGABRT."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(2, f"{CRASH} {why} (pid {os.getpid()})\n".encode())
    os.abort()


def install() -> None:
    """Makes this process a Mac's. psutil picks its code by sys.platform, so it is Linux's still."""
    import psutil  # noqa: F401

    from darwin_double import files, memory, modules, sockets, system, torch_mps

    system.install()
    files.install()
    memory.install()
    sockets.install()
    torch_mps.install()
    modules.install()
