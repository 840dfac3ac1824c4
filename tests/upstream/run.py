# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's own tests of its engine with this platform: ``python -m upstream.run`` in tests/."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from upstream import archive, selection

TESTS = Path(__file__).resolve().parents[1]


def run(files: tuple[str, ...], arguments: list[str] | None = None) -> int:
    """Runs ``files`` of vLLM's ``tests/v1`` in a separate process; returns pytest's exit status.

    Raises:
        archive.UnavailableError: the tests cannot be downloaded.
    """
    folder = archive.extracted()
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {
            "HF_HOME": home,
            "HF_HUB_OFFLINE": "1",
            # Many tests fork, which OpenMP's threads do not survive.
            "OMP_NUM_THREADS": "1",
            # This checkout takes precedence over an installed one.
            "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent))),
            "VLLM_METAL_DEVICE": "cpu",
            "VLLM_NO_USAGE_STATS": "1",
        }
        _compile(environment)
        command = [sys.executable, "-m", "pytest", "-p", "upstream.plugin", "-q"]
        command += ["-p", "no:cacheprovider", "-p", "no:warnings", "--timeout", "300"]
        paths = [f"tests/v1/{file}" for file in files]
        return subprocess.run(
            [*command, *(arguments or []), *paths],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
        ).returncode


def _compile(environment: dict[str, str]) -> None:
    """Compiles vLLM for `python -O`.

    test_kv_cache_utils gives such a process 60 s, and a slow machine takes longer to compile.
    """
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-O", "-c", "import vllm.v1.core.kv_cache_utils"]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="those that `make test-more` runs")
    parser.add_argument("--file", action="append", help="only this one, as selection.py names it")
    options, arguments = parser.parse_known_args()
    files = options.file or (selection.QUICK if options.quick else selection.RUN)
    try:
        return run(tuple(files), arguments)
    except archive.UnavailableError as error:
        print(f"vllm-tests: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
