# SPDX-License-Identifier: Apache-2.0
"""Who decides how vLLM's processes start; where engines run is shown in tests/darwin."""

import subprocess
import sys

import pytest
from darwin.run import run

TELL = (
    "from vllm.platforms import current_platform as platform; platform.device_type\n"
    "from vllm.utils.system_utils import get_mp_context\n"
    "print(get_mp_context().get_start_method())"
)


@pytest.mark.parametrize(
    ("variables", "method"), [({}, "spawn"), ({"VLLM_WORKER_MULTIPROC_METHOD": "fork"}, "fork")]
)
def test_macos_spawns_unless_told_otherwise(variables: dict[str, str], method: str) -> None:
    told = run(["-c", TELL], **variables)
    assert told.stdout.splitlines()[-1] == method, told.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="it is about Linux's own choice, fork")
def test_linux_is_left_alone() -> None:
    told = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-1] == "fork"
