# SPDX-License-Identifier: Apache-2.0
"""A macOS test double: makes a Linux process look like one on a Mac.

`install()` runs before anything else in a process and in all its Python children that inherit
PYTHONPATH (`sitecustomize.py`). It imitates these parts of macOS 15 on Apple silicon:

- `sys.platform`, `os.uname`, `platform.system`, `machine`, `release`, `mac_ver`; functions of `os`
  that only Linux has are missing
- multiprocessing's start method, `spawn`; a process that forks with torch or MLX loaded loses the
  child, as Apple's frameworks do not survive a fork
- torch with an MPS accelerator; emptying its caches ends the process: torch 2.13's wheel for
  macOS follows a null pointer to a host allocator there
- no /proc, /sys and /dev/shm for Python code; no ELF for pyelftools
- the fields of psutil's `virtual_memory`, and `sysctlbyname` (see `memory.py` for values and
  variables)
- the limit of 103 bytes for names of Unix sockets, Python's and ZeroMQ's; `socket.TCP_KEEPALIVE`

It does not imitate:

- Metal and MLX's GPU device: use VLLM_METAL_DEVICE=cpu, which the tests set
- compiled code: libraries are Linux's, in speed, threads and file formats; so wheels that
  choose a library by `sys.platform`, and our compiler of kernels for the CPU, see Linux
  (`modules.LINUX_WHEELS`, `LINUX_MODULES`)
- torch tensors on `mps`
- psutil but for `virtual_memory`: processes and their memory are read as on Linux
- programs other than Python and `caffeinate`: `uname`, `sysctl`, `vm_stat`, `sw_vers`
- `select.kqueue` in place of `epoll`, uvloop's own sockets, limits on the names of semaphores and
  shared memory, semaphores without a value, file names without case, code signing, sandboxes, the
  clock of a sleeping Mac

Before it ends a process, it prints a line that begins with `CRASH`.
"""

from __future__ import annotations

import os
import resource

#: Prefix of the stderr line printed before a process is ended as on a Mac.
CRASH = "darwin double: macOS would end this process:"


def crash(why: str) -> None:
    """Ends the process with SIGABRT."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.write(2, f"{CRASH} {why} (pid {os.getpid()})\n".encode())
    os.abort()


def install() -> None:
    """Makes this process look like a Mac's, except to psutil's own choice of platform."""
    import psutil  # noqa: F401

    from darwin_double import files, memory, modules, sockets, system, torch_mps

    system.install()
    files.install()
    memory.install()
    sockets.install()
    torch_mps.install()
    modules.install()
