# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs under the Darwin double (see `double/darwin_double`).

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
#: Prefix of the line of a process that the double ended as macOS would have.
CRASH = "darwin double: macOS would end this process:"
#: This process's variables that a user's environment would lack.
_NOT_A_USERS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_LOGGING_LEVEL",
    "PYTHONDONTWRITEBYTECODE",
    "OMP_NUM_THREADS",  # chosen by vLLM itself, unless a user sets it
)
#: A Mac's temporary folder has a path of 49 characters: /var/folders/…/T/.
_TMPDIR_LENGTH = 48


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment as on a user's Mac, plus `variables`."""
    path = os.pathsep.join(filter(None, (str(DOUBLE), os.environ.get("PYTHONPATH"))))
    kept = {key: value for key, value in os.environ.items() if key not in _NOT_A_USERS}
    settings = {
        "PYTHONPATH": path,
        "PATH": os.pathsep.join([str(DOUBLE / "bin"), os.environ["PATH"]]),
        "VLLM_METAL_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_METAL_CACHE": str(cache_dir()),  # shares models converted earlier
        # OpenMP settings as in vllm_metal.device.blas on Linux, for the same reason.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
    }
    return kept | settings | variables


def run(
    arguments: Sequence[str | Path], timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python *arguments` under the double; returns stdout and stderr separately, as text.

    Args:
        arguments: arguments of the interpreter: a script, or "-c" and code, or "-m" and a module.
        timeout: seconds.
        variables: environment variables on top of `environment()`.

    Raises:
        subprocess.TimeoutExpired: it did not end; everything it started was killed.
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
    """Like `run`, but yields the running process; kills everything it started at the block's end.

    Args:
        arguments: arguments of the interpreter.
        stdout: an open file for its output.
        stderr: likewise.
        variables: environment variables on top of `environment()`.

    On a Mac, and under the double itself, skips the test.
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
            start_new_session=True,  # so that the whole group can be killed
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
