# SPDX-License-Identifier: Apache-2.0
"""Makes each Python process that finds this module report its environment and imports.

Python imports it at start. A process writes a JSON file PID into the folder $PROCESS_REPORTS when
it starts, when it gets SIGUSR2, and when it ends. $EMULATED_PYTHON, if set, becomes
`sys.executable`, so that the interpreters a process starts are emulated too, which exec
alone does not do.
"""

import atexit
import ctypes
import json
import mmap
import os
import platform
import signal
import sys

#: Executes cpuid for leaf edi, subleaf esi; eax to edx go to the four words at rdx.
_CPUID = bytes.fromhex("53 89f8 89f1 4989d0 0fa2 418900 41895804 41894808 4189500c 5b c3")
#: Leaf, subleaf, register and bit of features (Intel's manual, volume 2, CPUID).
_FEATURES = {
    "avx": (1, 0, 2, 28),
    "avx2": (7, 0, 1, 5),
    "avx512f": (7, 0, 1, 16),
    "avx512_bf16": (7, 1, 0, 5),
}


def features():
    """Returns this processor's features among _FEATURES; none on other machines."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    code = mmap.mmap(-1, len(_CPUID), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(_CPUID)
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    word, words = ctypes.c_uint32, ctypes.c_uint32 * 4
    cpuid = ctypes.CFUNCTYPE(None, word, word, ctypes.POINTER(words))(address)

    def asked(leaf, subleaf):
        found = words()
        cpuid(leaf, subleaf, ctypes.byref(found))
        return found

    last = asked(0, 0)[0]
    return [
        name
        for name, (leaf, subleaf, register, bit) in _FEATURES.items()
        if leaf <= last and asked(leaf, subleaf)[register] >> bit & 1
    ]


def report(*_):
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if ".so" in line}
    told = {
        "arguments": sys.orig_argv,
        "features": features(),
        "modules": sorted(name for name in sys.modules if name.split(".")[0] == "vllm"),
        "libraries": sorted(libraries),
    }
    path = os.path.join(os.environ["PROCESS_REPORTS"], str(os.getpid()))
    with open(f"{path}.new", "w") as file:
        json.dump(told, file)
    os.replace(f"{path}.new", path)


if "PROCESS_REPORTS" in os.environ:
    sys.executable = os.environ.get("EMULATED_PYTHON", sys.executable)
    signal.signal(signal.SIGUSR2, report)
    atexit.register(report)
    os.register_at_fork(after_in_child=report)
    report()
