# SPDX-License-Identifier: Apache-2.0
"""Runs programs of this interpreter under the Darwin double (see `double/darwin_double`).

    python tests/darwin/run.py -m pytest tests/settings/test_envs.py

does so from a shell; tests call `run` and `start`.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from metal_kernels.cache import cache_dir

DOUBLE = Path(__file__).parent / "double"
#: Begins the line of a process that the double ended as macOS would have.
CRASH = "darwin double: macOS would end this process:"
#: What this process was told that a user's would not be.
_NOT_A_USERS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_LOGGING_LEVEL",
    "PYTHONDONTWRITEBYTECODE",
    "OMP_NUM_THREADS",  # of vLLM's own choice, unless a user makes one
)
#: A Mac's temporary folder has a name of 49 characters: /var/folders/…/T/.
_TMPDIR_LENGTH = 48


def environment(**variables: str) -> dict[str, str]:
    """This process's environment as a user of a Mac has it, and `variables`."""
    path = os.pathsep.join(filter(None, (str(DOUBLE), os.environ.get("PYTHONPATH"))))
    kept = {key: value for key, value in os.environ.items() if key not in _NOT_A_USERS}
    settings = {
        "PYTHONPATH": path,
        "PATH": os.pathsep.join([str(DOUBLE / "bin"), os.environ["PATH"]]),
        "VLLM_METAL_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_METAL_CACHE": str(cache_dir()),  # models converted before serve here, too
        # OpenMP as vllm_metal.device.blas sets it on Linux, and for its reason.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
    }
    return kept | settings | variables


def run(
    arguments: Sequence[str | Path], timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` under the double to its end; stdout and stderr apart, as text.

    Args:
        arguments: of this interpreter: a script, or "-c" and code, or "-m" and a module.
        timeout: seconds.
        variables: of the environment, on top of `environment()`.

    Raises:
        subprocess.TimeoutExpired: it did not end; all it started is gone.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        with start(arguments, out, err, **variables) as process:
            status = process.wait(timeout)
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(list(map(str, arguments)), status, *texts)


@contextmanager
def start(
    arguments: Sequence[str | Path], stdout: IO[Any], stderr: IO[Any], **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """As `run`, to be talked to while it runs; at the block's end all it started is killed.

    Args:
        arguments: of this interpreter.
        stdout: an open file for what it prints.
        stderr: likewise.
        variables: of the environment, on top of `environment()`.

    On a Mac, and under the double itself, it ends the test that asks for it as skipped.
    """
    if sys.platform != "linux":
        pytest.skip("the double of a Mac runs on Linux only")
    with tempfile.TemporaryDirectory(prefix="darwin-") as folder:
        tmpdir = Path(folder, "t" * max(1, _TMPDIR_LENGTH - len(folder) - 1))
        tmpdir.mkdir()
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment(**({"TMPDIR": str(tmpdir)} | variables)),
            start_new_session=True,  # so that all it starts can be killed as one group
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
